"""Token ids that the tokenizer does not have are never sampled or reported. With any parameters, outputs equal those of
a model that gives these ids zero probability."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.controllers.beams import BeamPool, BeamSearch
from bridle.engine import Engine, Request
from bridle.engine.control.decision import Decision, mask_of
from bridle.engine.interfaces import Executor
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.errors import InvalidRequest
from bridle.outputs import Event, FinishReason
from bridle.testing.logits import Logits, ScriptedModel
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import hosted
from tests.engine.support import Replay, make_request, replay
from tests.fakes.controller_runtime import FakeControllerPool, View

VOCAB, FIRST = 20, 13
UNNAMED = PaddedVocab.of([0, 5, 6, *range(FIRST, VOCAB)])  # gaps, and the last ones
_MODEL = ScriptedModel(VOCAB)


def eager(prefix: Sequence[int]) -> Logits:
    """Return logits whose highest value belongs to an id without a token."""
    row = _MODEL.row_after(prefix)
    row[list(UNNAMED)] += 6.0
    return row


def barred(prefix: Sequence[int]) -> Logits:
    row = _MODEL.row_after(prefix)
    row[list(UNNAMED)] = -np.inf
    return row


def run(executor: Executor, requests: Sequence[Request], unnamed: PaddedVocab, **options: Any) -> dict[str, Replay]:
    engine = Engine(executor, EngineConfig(), pools=[BeamPool(), FakeControllerPool()], unnamed=unnamed, **options)
    for request in requests:
        engine.add(request)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return replay(events)


def told(replays: dict[str, Replay]) -> list[Any]:
    """Return the data that clients get: tokens, log-probabilities of output and prompt, and the distributions of traced
    outputs."""
    return [
        (
            each.prompt and each.prompt.logprobs,
            [(one.tokens, one.logprobs, one.reason, one.stored) for one in each.outputs.values()],
            [getattr(record, "draw", None) for record in sorted(each.records, key=lambda record: record.output)],
        )
        for _, each in sorted(replays.items())
    ]


def half(view: View) -> Decision:
    """Return a decision to sample with a mask that allows ids with and without a token."""
    return Decision.sample(mask_of(range(len(view.tokens) % 2, VOCAB, 2), VOCAB))


def random_request(random: Random) -> Request:
    """Return a request with random sampling parameters, with or without masks and beam search. Its prompt may have ids
    without a token."""
    controller = random.choice([None, None, half, BeamSearch(3, 6)])
    if isinstance(controller, BeamSearch):
        return make_request((1, 2), controller=controller, max_tokens=6, temperature=0.0, ignore_eos=True)
    return make_request(
        random.choices(range(VOCAB), k=random.randint(1, 9)),
        max_tokens=random.randint(1, 12),
        temperature=random.choice([0.0, 0.7, 1.0, 3.0]),
        top_k=random.choice([0, 3, VOCAB]),
        top_p=random.choice([1.0, 0.8]),
        min_p=random.choice([0.0, 0.1]),
        n=1 if controller else random.choice([1, 3]),
        seed=random.randrange(100),
        repetition_penalty=random.choice([1.0, 1.5]),
        logit_bias=random.choice([{}, {3: 5.0}]),
        mirostat=random.choice([0, 2]),
        logprobs=random.choice([None, 0, VOCAB]),
        logprobs_mode=random.choice(["raw", "processed"]),
        prompt_logprobs=random.choice([None, VOCAB]),
        speculate=random.choice([0, 3]),
        trace=random.random() < 0.5,
        controller=controller,
    )


def scripted(next_token: Any, **options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(VOCAB, num_blocks=90, block_size=4, next_token=next_token, **options)


@given(st.integers(0, 1 << 32))
def test_it_is_as_if_the_model_gave_them_no_chance(seed: int) -> None:
    requests = [random_request(Random(seed + i)) for i in range(3)]
    mine = run(scripted(eager), requests, UNNAMED, draft=scripted(eager) if seed % 2 else None)
    assert told(mine) == told(run(scripted(barred), requests, NONE_UNNAMED))
    for each in mine.values():
        for output in each.outputs.values():
            assert output.tokens and UNNAMED.among(output.tokens) == set()
            tops = [pair[0] for logprob in output.logprobs if logprob is not None for pair in logprob.top]
            assert UNNAMED.among(tops) == set()


def test_nor_are_they_drafted() -> None:
    request = make_request((1, 2), max_tokens=12, temperature=0.0, speculate=4)
    replays = run(scripted(eager), [request], UNNAMED, draft=scripted(eager))
    usage = replays[request.id].first.usage
    assert usage.drafted_tokens == usage.accepted_tokens > 0


def test_they_are_drawn_where_nobody_forbids_it() -> None:
    request = make_request((1, 2), max_tokens=5, temperature=0.0)
    assert set(run(scripted(eager), [request], NONE_UNNAMED)[request.id].first.tokens) <= set(UNNAMED)


def test_a_shard_draws_none_either() -> None:
    requests = [random_request(Random(i)) for i in range(6)]
    with hosted(scripted(eager)) as host:
        executor = host.connect()
        assert told(run(executor, requests, UNNAMED)) == told(run(scripted(eager), requests, UNNAMED))
        executor.close()


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
def test_naming_them_is_refused(field: str) -> None:
    engine = Engine(scripted(eager), unnamed=UNNAMED)
    for token, told in ((FIRST, f"names token {FIRST}; the vocabulary has {FIRST}"), (6, "holds 6, an id that stands")):
        value: Any = {token: 1.0} if field == "logit_bias" else (1, token)
        with pytest.raises(InvalidRequest, match=f"{field} {told}"):
            engine.check(make_request((1,), **{field: value}))
    engine.check(make_request((VOCAB - 1,)))  # prompts may hold them: the model reads them


def test_a_mask_that_allows_no_others_is_a_fault_of_its_controller() -> None:
    request = make_request((1,), controller=lambda view: Decision.sample(mask_of([5, FIRST, VOCAB - 1], VOCAB)))
    replays = run(scripted(eager), [request], UNNAMED)
    finished = replays[request.id].first.finished
    assert finished is not None and finished.reason is FinishReason.ERROR
    assert "the mask allows no token" in str(finished.error)
