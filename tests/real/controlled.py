"""A real model with a runtime for controllers, for tests of scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle import LLM, ModelConfig
from bridle.controller_tools import ToolExecutor
from bridle.serving import ControlSettings, load_model
from tests.real.material import model_path, num_threads


@contextlib.contextmanager
def controlled(
    name: str, request: pytest.FixtureRequest, folder: Path, tools: ToolExecutor | None = None
) -> Iterator[LLM]:
    """Yield a model with a runtime for controllers that waits for the first script's compilation. Compiled code is kept
    in pytest's cache, or in `folder` without a cache."""
    cache = getattr(request.config, "cache", None)
    store = folder if cache is None else Path(cache.mkdir("bridle-py-store"))
    limits = ("--wasm-max-step-time=4000", "--limit", "max_prepare_wait=1200000", "--limit", "max_init_time=20000")
    control = ControlSettings("on", args=limits, store=store)
    config = ModelConfig(str(model_path(name)), num_threads=num_threads())
    with LLM(load_model(config, control=control, tools=tools)) as loaded:
        yield loaded
