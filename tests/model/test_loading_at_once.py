"""Tests of models that several threads load at the same time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from bridle.backends import load_executor
from bridle.config import ModelConfig
from bridle.threads import start_thread
from tests.waiting import PATIENCE


def test_two_loads_leave_the_library_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers patches its classes while it makes a model. The test starts a second load while the first model is
    made, and the patches must be undone."""
    both, first_is_done = threading.Event(), threading.Event()
    make = LlamaForCausalLM.__init__
    order: list[int] = []

    def slowly(self: Any, *args: Any, **kwargs: Any) -> None:
        order.append(threading.get_ident())
        if len(order) == 1:
            both.wait(0.5)  # nothing comes if the loads take turns
        else:
            both.set()
            first_is_done.wait(PATIENCE)
        make(self, *args, **kwargs)

    def load() -> None:
        load_executor(ModelConfig("demo", num_blocks=64)).close()
        first_is_done.set()

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "__init__", slowly)
        for loading in [start_thread(load, "first"), start_thread(load, "second")]:
            loading.result(PATIENCE)
    load()
