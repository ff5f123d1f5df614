"""Embeddings come from the same steps as tokens: in parts, from the cache, after preemptions, always the same."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.errors import UnsupportedFeature
from bridle.outputs import Embedded, Finished, FinishReason, PromptEvent, TokenEvent
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.support import alone, make_request, run


@given(st.integers(0, 1 << 40))
def test_a_vector_depends_on_its_text_alone(seed: int) -> None:
    random = Random(seed)
    executor = ScriptedExecutor(8, random.randint(8, 24), 4, embedding_size=5)
    config = EngineConfig(max_num_batched_tokens=random.randint(1, 12), max_num_seqs=random.randint(1, 4))
    engine = Engine(executor, config)
    prompts = {}
    for number in range(8):
        prompt = [random.randrange(2) for _ in range(random.randint(1, 20))]
        embeds = random.random() < 0.6
        engine.add(make_request(prompt, id=str(number), max_tokens=1 if embeds else 6, embeds=embeds))
        if embeds:
            prompts[str(number)] = prompt
    events = run(engine)
    found = {event.request_id: event.vector for event in events if isinstance(event, Embedded)}
    assert found == {name: alone(prompt) for name, prompt in prompts.items()}
    assert not {event.request_id for event in events if isinstance(event, TokenEvent)} & found.keys()
    assert engine.statistics().num_free_blocks == executor.info.num_blocks
    assert not executor.violations


def test_the_events_of_an_embedding() -> None:
    engine = Engine(ScriptedExecutor(8, 64, 4, embedding_size=5))
    engine.add(make_request([1, 2, 3], id="a", max_tokens=1, embeds=True))
    prompt, embedded, finished = run(engine)
    assert isinstance(prompt, PromptEvent) and isinstance(embedded, Embedded) and isinstance(finished, Finished)
    assert finished.reason is FinishReason.STOP and finished.usage.prompt_tokens == 3
    assert finished.usage.completion_tokens == finished.usage.sampled_tokens == 0


def test_an_executor_without_vectors_refuses() -> None:
    engine = Engine(ScriptedExecutor(8, 64, 4))
    with pytest.raises(UnsupportedFeature, match="computes no embeddings"):
        engine.add(make_request([1], max_tokens=1, embeds=True))
    assert not engine.has_work
