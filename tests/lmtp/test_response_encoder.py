"""Tests of the encoder from events to LMTP answers. The tests cover every rule of a stream, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.request import Request
from bridle.errors import BridleError, ControllerError, InvalidRequest, OutOfBlocks
from bridle.lmtp.messages import EventMessage, Failure, StreamAnswer, Token
from bridle.lmtp.server.response_encoder import EncodingOptions, GenerateTeller, ScoreTeller
from bridle.outputs import Event as EngineEvent
from bridle.outputs import Finished, FinishReason, Forked, Log, Logprob, PromptEvent, Rewind, TokenEvent, Usage
from bridle.sampling import SamplingParams

EOS = 99


class Steered:
    """A controller that announces its maximum rollback."""

    def __init__(self, max_rewind: int | None = None) -> None:
        self.max_rewind = max_rewind


def teller(controller: object = None, sampling: SamplingParams | None = None, **how: Any) -> GenerateTeller:
    request = Request("r", (1,), sampling or SamplingParams(logprobs=1), controller=controller)
    return GenerateTeller(EncodingOptions(7, EOS, **how), request)


def token(number: int, index: int = 0, text: str = "") -> TokenEvent:
    return TokenEvent("r", index, number, text, Logprob(number, -0.5, ((number, -0.5),)))


def finished(reason: FinishReason = FinishReason.LENGTH, index: int = 0, **more: Any) -> Finished:
    return Finished("r", index, reason, **more)


def told(of: GenerateTeller, *batches: list[EngineEvent]) -> list[StreamAnswer]:
    return [answer for batch in batches for answer in of.encode(batch)]


def shape(answers: list[StreamAnswer]) -> list[Any]:
    """Return the essential data of objects: tokens with their finish reason, error codes, and names of events."""
    return [
        (answer.token, answer.finish_reason)
        if isinstance(answer, Token)
        else answer.code
        if isinstance(answer, Failure)
        else answer.event
        for answer in answers
    ]


def test_a_token_goes_out_with_its_batch_and_the_last_one_with_its_finish() -> None:
    of = teller()
    assert shape(told(of, [token(1)])) == [(1, None)]
    assert shape(told(of, [token(2), finished()])) == [(2, "length")]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.CONTROLLER])
def test_each_finish_reason_has_its_name_in_the_protocol(reason: FinishReason) -> None:
    assert shape(told(teller(), [token(EOS), finished(reason)])) == [(EOS, "stop")]


def test_late_in_a_stream_one_token_waits_so_that_a_failure_can_end_it() -> None:
    of = teller()
    answers = told(of, *([token(number)] for number in range(1, 7)))
    assert shape(answers) == [(number, None) for number in range(1, 6)]
    assert shape(list(of.fail(OutOfBlocks("full")))) == [(6, "length")]
    assert of.is_over and of.has_failed


@pytest.mark.parametrize(
    ("num", "how", "error"),
    [
        (3, {}, OutOfBlocks("full")),  # LMQL has not used any yet, and sees the error
        (6, {"is_extended": True}, OutOfBlocks("full")),  # this client wants to know
        (6, {}, InvalidRequest("wrong")),  # to ask again would not help
    ],
)
def test_other_failures_are_told(num: int, how: dict[str, Any], error: BridleError) -> None:
    of = teller(**how)
    answers = told(of, *([token(number)] for number in range(num)))
    answers += of.fail(error)
    assert shape(answers) == [*((number, None) for number in range(num)), error.code]


def test_an_output_without_a_token_still_answers() -> None:
    (answer,) = told(teller(), [finished(FinishReason.CONTROLLER)])
    assert answer == Token(stream_id=7, token=EOS, logprob=0.0, finish_reason="stop", top_logprobs={EOS: 0.0})
    (answer,) = told(teller(is_extended=True), [finished(FinishReason.CONTROLLER)])
    assert isinstance(answer, Token)
    assert (answer.token, answer.finish_reason) == (None, "stop")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.DEADLINE, "deadline_exceeded"),
        (FinishReason.CANCELLED, "engine_closed"),
        (FinishReason.ERROR, "internal_error"),
    ],
)
def test_bad_endings_are_errors(reason: FinishReason, code: str) -> None:
    assert shape(told(teller(), [token(1)], [finished(reason)])) == [(1, None), code]


def test_text_comes_whole() -> None:
    of = teller(with_text=True)
    answers = told(of, [token(1, text="a")], [token(2)], [token(3, text="é"), finished(text="!")])
    assert [answer.text for answer in answers if isinstance(answer, Token)] == ["a", "", "é!"]
    assert all(answer.text is None for answer in told(teller(), [token(1, text="a")]) if isinstance(answer, Token))


def test_usage_goes_to_those_who_know_it() -> None:
    (answer,) = told(teller(is_extended=True), [token(1), finished()])
    assert isinstance(answer, Token) and answer.usage is not None
    assert answer.usage["completion_tokens"] == 0
    assert answer.usage.keys() >= Usage().predictions().keys()


def test_so_does_the_seed_of_what_was_drawn() -> None:
    drawn = SamplingParams(logprobs=1, seed=5)
    for sampling, is_extended, seed in (
        (drawn, True, 5),
        (drawn, False, None),
        (drawn.with_(temperature=0), True, None),
    ):
        (answer,) = told(teller(sampling=sampling, is_extended=is_extended), [token(1), finished()])
        assert isinstance(answer, Token) and answer.seed == seed


def test_the_chosen_token_is_always_among_the_best() -> None:
    event = TokenEvent("r", 0, 9, "", Logprob(9, -3.0, ((4, -0.5), (5, -1.0))))
    (answer,) = told(teller(), [event])
    assert isinstance(answer, Token)
    assert answer.top_logprobs == {4: -0.5, 5: -1.0, 9: -3.0}


# -- steered streams -----------------------------------------------------------------------------------------


def test_what_may_be_taken_back_is_held() -> None:
    of = teller(Steered(2), with_text=True)
    answers = told(of, [token(1, text="a"), token(2, text="b")], [token(3, text="c")], [token(4, text="d")])
    assert shape(answers) == [(1, None)]  # 2 is final too, but may be the last
    answers = told(of, [Rewind("r", 0, 2, 2)], [token(8, text="x"), finished(FinishReason.CONTROLLER)])
    assert shape(answers) == [(2, None), (8, "stop")]
    assert [answer.text for answer in answers if isinstance(answer, Token)] == ["b", "x"]


def test_a_controller_that_says_nothing_of_rewinds_is_heard_at_the_end() -> None:
    of = teller(Steered())
    assert told(of, [token(1)], [token(2)], [Rewind("r", 0, 1, 0)]) == []
    assert shape(told(of, [finished(FinishReason.CONTROLLER)])) == [(1, "stop")]


def test_only_the_first_branch_is_sent() -> None:
    of = teller(Steered(0))
    answers = told(of, [token(1)], [Forked("r", 1, 0, 1)], [token(2), token(3, 1)], [finished(), finished(index=1)])
    assert shape(answers) == [(1, None), (2, "length")]
    assert of.is_over


def test_a_broken_word_is_an_error() -> None:
    of = teller(Steered(0))
    told(of, [token(1)], [token(2)])
    with pytest.raises(ControllerError, match="rolled back"):
        told(of, [Rewind("r", 0, 2, 0)])


def test_events_for_those_who_asked() -> None:
    of = teller(Steered(), shows_events=True, is_extended=True)
    answers = told(
        of,
        [token(1)],
        [Rewind("r", 0, 1, 3), token(2)],
        [Forked("r", 1, 0, 1), token(3), token(4, 1)],
        [Log("r", 0, "hi"), finished(FinishReason.CONTROLLER)],
        [token(5, 1), finished(index=1)],
    )
    assert shape(answers) == [
        *((1, None), "rewind", (2, None), "fork", (3, None), (4, None), "log", (None, "stop"), (5, "length"))
    ]
    events = [answer for answer in answers if isinstance(answer, EventMessage)]
    assert [event.data for event in events] == [
        {"branch": 0, "num_tokens": 1, "num_chars": 3},
        {"branch": 1, "parent": 0, "num_tokens": 1},
        {"branch": 0, "text": "hi"},
    ]
    assert [answer.branch for answer in answers if isinstance(answer, Token)] == [0, 0, 0, 1, 0, 1]


@st.composite
def histories(draw: Any) -> list[list[EngineEvent]]:
    """Generate batches of events for one output of a controller with a maximum rollback."""
    batches: list[list[EngineEvent]] = []
    length = 0
    for number in range(draw(st.integers(0, 12))):
        back = draw(st.integers(0, min(2, length)))
        batch: list[EngineEvent] = [Rewind("r", 0, back, back)] if back else []
        length += 1 - back
        batches.append([*batch, token(number, text="x")])
    end = finished(draw(st.sampled_from([FinishReason.STOP, FinishReason.CONTROLLER, FinishReason.LENGTH])))
    if draw(st.booleans()) and batches:
        batches[-1].append(end)
    else:
        batches.append([end])
    return batches


@given(histories())
def test_held_or_shown_a_client_ends_up_with_the_same(batches: list[list[EngineEvent]]) -> None:
    kept: list[int] = []
    for answer in told(teller(Steered(), shows_events=True, is_extended=True), *batches):
        if isinstance(answer, EventMessage):
            del kept[len(kept) - answer.data["num_tokens"] :]
        elif isinstance(answer, Token) and answer.token is not None:
            kept.append(answer.token)
    # Two rewinds in a row can take back what was final: a controller's bound counts from the end at any moment.
    held = told(teller(Steered(None)), *batches)
    assert all(isinstance(answer, Token) for answer in held)
    assert [answer.token for answer in held if isinstance(answer, Token)] == (kept or [EOS])
    assert [answer.finish_reason is not None for answer in held if isinstance(answer, Token)].count(True) == 1


# -- scores --------------------------------------------------------------------------------------------------


def test_scored_tokens_are_sent_with_their_logprobs() -> None:
    of = ScoreTeller(7, 2)
    scores = (None, Logprob(5, -1.0), Logprob(6, -2.0))
    answers = list(of.encode([PromptEvent("r", 0, (4, 5, 6), 0, scores), finished()]))
    assert answers == [
        Token(stream_id=7, token=5, logprob=-1.0),
        Token(stream_id=7, token=6, logprob=-2.0, finish_reason="stop"),
    ]
    of = ScoreTeller(7, 2)
    assert shape(list(of.encode([finished(FinishReason.ERROR, error=OutOfBlocks("full"))]))) == ["out_of_blocks"]
    assert of.has_failed
