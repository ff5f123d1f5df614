"""The engine's properties with its executor in this process. tests/distributed has it elsewhere."""

from tests.engine.engine_properties import *  # noqa: F403
from tests.engine.fork_properties import *  # noqa: F403
from tests.engine.rewind_properties import *  # noqa: F403
