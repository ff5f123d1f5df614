"""Controllers that come with bridle, and the base class for plain Python ones."""

from bridle.controllers.pool import PythonControllerPool
from bridle.controllers.python import Controller, SequenceView

__all__ = ["Controller", "PythonControllerPool", "SequenceView"]
