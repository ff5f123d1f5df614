"""Log-probabilities of a prompt: of all of it or of its end, and of a prompt with nothing to score."""

from __future__ import annotations

import pytest

from bridle.engine import AsyncEngine, Engine, Request
from bridle.outputs import Logprob, PromptEvent
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor


@pytest.fixture
def client() -> AsyncEngine:
    return AsyncEngine(Engine(ScriptedExecutor(vocab_size=32, num_blocks=64, block_size=4))).start()


def scores(client: AsyncEngine, prompt: tuple[int, ...], start: int) -> tuple[tuple[Logprob | None, ...], int]:
    """Scores of a prompt from `start` on, and how many of its tokens were cached."""
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
