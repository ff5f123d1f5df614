"""Functions that make llama.cpp executors for tests."""

from __future__ import annotations

from typing import Any

from bridle.config import ModelConfig
from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.llamacpp import load_executor
from bridle.llamacpp.executor import LlamaExecutor
from tests.gguf.kit import pair


def started(family: str, kind: str = "F32", **settings: Any) -> LlamaExecutor:
    _, file = pair(family, kind)
    config = {"num_blocks": 32, "block_size": 8, "dtype": "float32", "num_threads": 1, **settings}
    return load_executor(ModelConfig(str(file), backend="llamacpp", **config))


def prompt_plan(step: int, seq_id: int, tokens: list[int], num_logits: int) -> StepPlan:
    return StepPlan(step, [PlanRow(seq_id, 0, len(tokens), num_logits, 0, tuple(tokens), num_prompt=len(tokens))])
