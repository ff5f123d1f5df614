"""Ids that the model has and no token stands for are never drawn nor told: outputs are those of a model that gives them
no chance, whatever the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine import Engine, Request
from bridle.engine.decision import Decision, mask_of
from bridle.engine.interfaces import Executor
from bridle.errors import InvalidRequest
from bridle.outputs import Event, FinishReason
from bridle.testing.logits import Logits, ScriptedModel
from bridle.testing.scripted import ScriptedExecutor
from lab.doubles.controllers import FakeControllerPool
from tests.cluster.kit import hosted
from tests.engine.support import Replay, make_request, replay

VOCAB, NUM_UNNAMED = 20, 7
FIRST = VOCAB - NUM_UNNAMED
_MODEL = ScriptedModel(VOCAB)


def eager(prefix: Sequence[int]) -> Logits:
    """Logits in which an id without a token is the likeliest."""
    row = _MODEL.row_after(prefix)
    row[FIRST:] += 6.0
    return row


def barred(prefix: Sequence[int]) -> Logits:
    row = _MODEL.row_after(prefix)
    row[FIRST:] = -np.inf
    return row


def run(executor: Executor, requests: Sequence[Request], num_unnamed: int, **options: Any) -> dict[str, Replay]:
    engine = Engine(executor, EngineConfig(), num_unnamed=num_unnamed, **options)
    for request in requests:
        engine.add(request)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return replay(events)


def told(replays: dict[str, Replay]) -> list[Any]:
    """What clients learn: tokens, their odds and those of the prompt, and what traced ones were drawn from."""
    return [
        (
            each.prompt and each.prompt.logprobs,
            [(one.tokens, one.logprobs, one.reason) for one in each.outputs.values()],
            [getattr(record, "draw", None) for record in each.records],
        )
        for _, each in sorted(replays.items())
    ]


def random_request(random: Random) -> Request:
    """Any sampling, with prompts that may hold such ids."""
    return make_request(
        random.choices(range(VOCAB), k=random.randint(1, 9)),
        max_tokens=random.randint(1, 12),
        temperature=random.choice([0.0, 0.7, 1.0, 3.0]),
        top_k=random.choice([0, 3, VOCAB]),
        top_p=random.choice([1.0, 0.8]),
        min_p=random.choice([0.0, 0.1]),
        n=random.choice([1, 3]),
        seed=random.randrange(100),
        repetition_penalty=random.choice([1.0, 1.5]),
        logit_bias=random.choice([{}, {3: 5.0}]),
        mirostat=random.choice([0, 2]),
        logprobs=random.choice([None, 0, VOCAB]),
        logprobs_mode=random.choice(["raw", "processed"]),
        prompt_logprobs=random.choice([None, VOCAB]),
        speculate=random.choice([0, 3]),
        trace=random.random() < 0.5,
    )


def scripted(next_token: Any, **options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(VOCAB, num_blocks=90, block_size=4, next_token=next_token, **options)


@given(st.integers(0, 1 << 32))
def test_it_is_as_if_the_model_gave_them_no_chance(seed: int) -> None:
    requests = [random_request(Random(seed + i)) for i in range(3)]
    mine = run(scripted(eager), requests, NUM_UNNAMED)
    assert told(mine) == told(run(scripted(barred), requests, 0))
    for each in mine.values():
        for output in each.outputs.values():
            assert output.tokens and max(output.tokens) < FIRST
            tops = [pair[0] for logprob in output.logprobs if logprob is not None for pair in logprob.top]
            assert max(tops, default=0) < FIRST


def test_they_are_drawn_where_nobody_forbids_it() -> None:
    request = make_request((1, 2), max_tokens=5, temperature=0.0)
    assert min(run(scripted(eager), [request], 0)[request.id].first.tokens) >= FIRST


def test_a_shard_draws_none_either() -> None:
    requests = [random_request(Random(i)) for i in range(6)]
    with hosted(scripted(eager)) as host:
        executor = host.connect()
        assert told(run(executor, requests, NUM_UNNAMED)) == told(run(scripted(eager), requests, NUM_UNNAMED))
        executor.close()


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
def test_naming_them_is_refused(field: str) -> None:
    value: Any = {FIRST: 1.0} if field == "logit_bias" else (1, FIRST)
    engine = Engine(scripted(eager), num_unnamed=NUM_UNNAMED)
    with pytest.raises(InvalidRequest, match=f"{field} names token {FIRST}; the vocabulary has {FIRST}"):
        engine.check(make_request((1,), **{field: value}))
    engine.check(make_request((VOCAB - 1,)))  # prompts may hold them: the model reads them


def test_a_mask_that_allows_no_others_is_a_fault_of_its_controller() -> None:
    request = make_request((1,), controller=lambda view: Decision.sample(mask_of([FIRST, VOCAB - 1], VOCAB)))
    replays = run(scripted(eager), [request], NUM_UNNAMED, pools=[FakeControllerPool()])
    finished = replays[request.id].first.finished
    assert finished is not None and finished.reason is FinishReason.ERROR
    assert "the mask allows no token at all" in str(finished.error)
