"""Tests of the engine's properties with the executor in this process. tests/distributed runs them with the executor in
other processes."""

from tests.engine.engine_properties import *  # noqa: F403
from tests.engine.fork_properties import *  # noqa: F403
from tests.engine.rewind_properties import *  # noqa: F403
