"""Controllers that come with bridle, and the base class for controllers in plain Python. Names are imported when first
used."""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.controllers.pool import PythonControllerPool as PythonControllerPool
    from bridle.controllers.python import Controller as Controller
    from bridle.controllers.python import SequenceView as SequenceView
else:
    __getattr__, __all__ = lazy_names(__name__, {"pool": "PythonControllerPool", "python": "Controller SequenceView"})
