"""Tests of embeddings and prompt log-probabilities that run in chunks, from the prefix cache, and after preemptions."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine import AsyncEngine, Engine, Request
from bridle.errors import UnsupportedFeature
from bridle.outputs import Embedded, Finished, FinishReason, Logprob, PromptEvent, TokenEvent
from bridle.sampling import SamplingParams
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


@pytest.fixture
def client() -> AsyncEngine:
    return AsyncEngine(Engine(ScriptedExecutor(vocab_size=32, num_blocks=64, block_size=4))).start()


def scores(client: AsyncEngine, prompt: tuple[int, ...], start: int) -> tuple[tuple[Logprob | None, ...], int]:
    """Return the log-probabilities of a prompt from position `start` on, and the number of its cached tokens."""
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
    events = [event for batch in client.submit(Request(f"{prompt} {start}", prompt, sampling)) for event in batch]
    (told,) = [event for event in events if isinstance(event, PromptEvent)]
    return told.logprobs, told.num_cached


@pytest.mark.timeout(30)
def test_the_end_of_a_prompt_is_scored_alike_and_the_rest_is_cached(client: AsyncEngine) -> None:
    with client:
        prompt = tuple(range(1, 21))
        whole, _ = scores(client, prompt, 0)
        assert whole[0] is None and None not in whole[1:]
        for start in (1, 5, 13, 19):
            part, num_cached = scores(client, prompt, start)
            assert part == (*[None] * start, *whole[start:])
            assert num_cached == (start - 1) // 4 * 4
        assert scores(client, prompt, 20)[0] == scores(client, prompt, 99)[0] == (None,) * 20


@pytest.mark.timeout(30)
def test_a_prompt_of_one_token_has_nothing_to_score_and_ends_all_the_same(client: AsyncEngine) -> None:
    with client:
        assert scores(client, (7,), 0)[0] == (None,)
