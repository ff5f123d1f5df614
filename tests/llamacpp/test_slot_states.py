"""Tests of a KV store for llama.cpp: after a restart, slots are restored from the store and give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")

from bridle import LLM
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan
from bridle.kv_store.store import list_segments
from tests.gguf.kit import pair
from tests.gguf.later_models import RECURRENT
from tests.kv_store.kit import damage
from tests.llamacpp.kit import prompt_plan, started

PROMPT = [5 + i * i % 90 for i in range(70)]
#: Attention alone, windows, and recurrent layers.
FAMILIES = ["llama", "gemma3_text", "lfm2"]


def answers(family: str, folder: Path | None, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Start an engine and run the prompts; return each output's tokens and its number of cached tokens."""
    kind, fields = RECURRENT.get(family, (family, {}))
    _, file = pair(kind, "F32", **fields)
    options: dict[str, Any] = {"backend": "llamacpp", "dtype": "float32", "num_blocks": 60, "num_threads": 1}
    with LLM(str(file), kv_store=None if folder is None else str(folder), **options) as llm:
        outputs = [llm.generate([each], max_tokens=20, temperature=0, ignore_eos=True)[0] for each in prompts]
        return [(list(each.outputs[0].token_ids), each.usage.cached_tokens) for each in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_after_a_restart_computes_only_new_tokens(tmp_path: Path, family: str) -> None:
    ((first, found),) = answers(family, tmp_path, [PROMPT])
    assert found == 0
    following = [*PROMPT, *first, 7, 8]
    ((want, _),) = answers(family, None, [following])
    assert answers(family, tmp_path, [following]) == [(want, len(PROMPT) + 19)]


def test_damaged_files_cost_time_alone(tmp_path: Path) -> None:
    ((want, _),) = answers("llama", tmp_path, [PROMPT])
    for number, kind in enumerate(("flip", "cut", "zeros", "garbage", "swap")):
        for path, _, _ in list(list_segments(tmp_path)):
            damage(path, kind, number)
        assert answers("llama", tmp_path, [PROMPT])[0][0] == want


@pytest.mark.parametrize("family", FAMILIES)
def test_states_come_back_exactly(family: str) -> None:
    source, target = started(family), started(family)
    source.forward(prompt_plan(1, 5, PROMPT[:40], 1))
    state = memoryview(bytearray(source.sequence_states.read(5)))
    assert len(state) == source.sequence_states.size_of(5, 40) > 0
    assert target.sequence_states.identity() == source.sequence_states.identity()
    assert target.sequence_states.adopt(9, None, PROMPT[:40], state)
    assert not target.sequence_states.adopt(9, None, PROMPT[:40], state)
    assert bytes(target.sequence_states.read(9)) == bytes(state)
    for executor in (source, target):
        executor.close()


def test_a_state_that_llama_cpp_refuses_begins_nothing() -> None:
    executor = started("llama")
    assert not executor.sequence_states.adopt(9, None, PROMPT[:40], memoryview(bytearray(100)))
    executor.forward(prompt_plan(1, 9, PROMPT[:40], 1))
    executor.sample(SampleBatch(1))
    executor.forward(StepPlan(2, freed=[9]))
    assert executor.sequence_states.size_of(9, 40) == 0
    executor.close()
