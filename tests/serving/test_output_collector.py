"""Tests that events are collected to outputs with any rollbacks and forks, and that readers get each event once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.request import Request
from bridle.errors import ControllerError
from bridle.outputs import (
    CompletionOutput,
    Event,
    Finished,
    FinishReason,
    Forked,
    Log,
    Logprob,
    PromptEvent,
    RequestOutput,
    Rewind,
    Stored,
    TokenEvent,
    Usage,
)
from bridle.sampling import SamplingParams
from bridle.serving import (
    REWIND_MARK,
    DeltaReader,
    OutputCollector,
    RewindPolicy,
    best_outputs,
    max_rewind_of,
    raise_first_error,
)
from bridle.serving.outputs.output_collector import collect
from tests.serving.fakes import fake_model


@dataclass
class Controlled:
    max_rewind: object = None


def request(controller: object | None = None, **sampling: object) -> Request:
    return Request("r", (1, 2), SamplingParams(**sampling), controller)  # type: ignore[arg-type]


def token(number: int, text: str, index: int = 0) -> TokenEvent:
    return TokenEvent("r", index, number, text, Logprob(number, -1.0))


def test_tokens_text_and_the_rest_add_up() -> None:
    collector = OutputCollector(request(logprobs=0, prompt_logprobs=0), "prompt")
    prompt = PromptEvent("r", 0, (1, 2, 3), 2, (None, Logprob(2, -1.0), Logprob(3, -2.0)))
    collector.add([prompt, token(5, "a"), token(6, ""), Log("r", 0, "log "), Log("r", 0, "ged")])
    collector.add([token(7, "bc"), Stored("r", 0, "x", b"1"), Finished("r", 0, FinishReason.STOP, Usage(3), "!", "\n")])
    output = collector.output
    assert output.prompt == "prompt"
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.num_cached_tokens == 2
    assert [entry and entry.logprob for entry in output.prompt_logprobs or ()] == [None, -1.0, -2.0]
    only = output.outputs[0]
    assert (only.text, only.token_ids, only.logs) == ("abc!", [5, 6, 7], "log ged")
    assert [entry and entry.token for entry in only.logprobs or ()] == [5, 6, 7]
    assert (only.finish_reason, only.stop_reason, only.usage) == (FinishReason.STOP, "\n", Usage(3))
    assert output.storage == {"x": b"1"}


def test_a_rewind_takes_tokens_and_text_back() -> None:
    collector = OutputCollector(request(logprobs=0))
    # Token 2 brought a character that token 1 had begun; taking token 2 back leaves that character's share.
    collector.add([token(1, ""), token(2, "ab"), Rewind("r", 0, 1, 1), token(3, "c")])
    only = collector.output.outputs[0]
    assert (only.text, only.token_ids, len(only.logprobs or ())) == ("ac", [1, 3], 2)


def test_forks_copy_their_parent() -> None:
    collector = OutputCollector(request(logprobs=0))
    collector.add([token(1, "a"), token(2, "b"), Forked("r", 3, 0, 1, "a"), token(9, "z", 3), token(3, "c")])
    collector.add([Forked("r", 1, 3, 2, "az")])
    assert [output.index for output in collector.output.outputs] == [0, 1, 3]
    assert [output.text for output in collector.output.outputs] == ["abc", "az", "az"]
    assert [output.token_ids for output in collector.output.outputs] == [[1, 2, 3], [1, 9], [1, 9]]


def test_stored_variables_are_bounded() -> None:
    collector = OutputCollector(request())
    big = bytes(9 << 20)
    collector.add([Stored("r", 0, "a", big), Stored("r", 0, "b", big), Stored("r", 0, "a", b"small")])
    assert collector.output.storage == {"a": b"small"}
    collector.add([Stored("r", 0, "a", b"er", is_append=True), Stored("r", 0, "a", big * 2, is_append=True)])
    assert collector.output.storage == {"a": b"smaller"}


async def test_collect_reads_to_the_end_and_errors_are_raised() -> None:
    model = fake_model()
    asked = request(n=2)
    output = await collect(model.client.submit(asked), OutputCollector(asked))
    assert [each.text for each in output.outputs] == ["hello", "hello"]
    raise_first_error(output)
    output.outputs[1].error = ControllerError("broke")
    with pytest.raises(ControllerError, match="broke"):
        raise_first_error(output)


def test_best_outputs_rank_by_mean_logprob() -> None:
    def output(index: int, *logprobs: float) -> CompletionOutput:
        return CompletionOutput(index, str(index), logprobs=[Logprob(0, value) for value in logprobs])

    best = best_outputs([output(0, -1, -1), output(1, -3, -0.2), output(2, -0.5), output(3)], 3)
    assert [(each.index, each.text) for each in best] == [(0, "2"), (1, "0"), (2, "1")]
    assert [each.text for each in best_outputs([output(0), output(1, -9)], 2)] == ["1", "0"]


@pytest.mark.parametrize(
    ("controller", "expected"),
    [
        (None, 0),
        (object(), None),
        (Controlled(3), 3),
        (Controlled(-1), None),
        (Controlled("x"), None),
        (Controlled(0), 0),
    ],
)
def test_a_controller_announces_how_far_it_rewinds(controller: object | None, expected: int | None) -> None:
    assert max_rewind_of(request(controller)) == expected


def test_without_a_controller_nothing_is_held() -> None:
    collector = OutputCollector(request())
    reader = DeltaReader(collector)
    collector.add([token(1, "a")])
    (first,) = reader.read()
    assert (first.text, first.tokens, first.is_first, first.is_last) == ("a", (1,), True, False)
    assert reader.read() == []
    collector.add([token(2, ""), token(3, "bc")])
    (second,) = reader.read()
    assert (second.text, second.tokens, second.start, second.is_first) == ("bc", (2, 3), 1, False)
    collector.add([Finished("r", 0, FinishReason.LENGTH, text="!")])
    (last,) = reader.read()
    assert (last.text, last.tokens, last.is_last) == ("!", (), True)
    assert reader.read() == []


def test_hold_shows_nothing_that_may_be_taken_back() -> None:
    collector = OutputCollector(request(Controlled()))
    reader = DeltaReader(collector)
    collector.add([token(1, "a"), token(2, "b")])
    (first,) = reader.read()
    assert (first.text, first.tokens) == ("", ())
    collector.add([Rewind("r", 0, 2, 2), token(3, "c"), Finished("r", 0)])
    (last,) = reader.read()
    assert (last.text, last.tokens, last.taken_tokens) == ("c", (3,), 0)


def test_hold_lets_through_what_an_announced_rewind_cannot_reach() -> None:
    collector = OutputCollector(request(Controlled(1)))
    reader = DeltaReader(collector)
    collector.add([token(1, "a"), token(2, "b")])
    assert [delta.text for delta in reader.read()] == ["a"]
    collector.add([Rewind("r", 0, 1, 1), token(3, "c"), token(4, "d")])
    assert [delta.text for delta in reader.read()] == ["c"]
    collector.add([Rewind("r", 0, 2, 2)])
    with pytest.raises(ControllerError, match="announced to roll back at most 1"):
        reader.read()


def test_mark_puts_a_sign_where_text_was_taken_back() -> None:
    collector = OutputCollector(request(Controlled()))
    reader = DeltaReader(collector, RewindPolicy.MARK)
    collector.add([token(1, "a"), token(2, "b")])
    assert [delta.text for delta in reader.read()] == ["ab"]
    collector.add([Rewind("r", 0, 1, 1), token(3, "c")])
    (delta,) = reader.read()
    assert (delta.text, delta.taken_tokens, delta.taken_chars) == (REWIND_MARK + "c", 1, 1)


# -- properties over random histories -----------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("token"), st.integers(0, 2), st.text("abcé", max_size=3)),
        st.tuples(st.just("rewind"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("fork"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("read"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def play(steps: list[tuple[str, int, object]]) -> list[list[Event]]:
    """Return a valid history: batches of events, split at each step `read`."""
    outputs: dict[int, list[tuple[int, str]]] = {0: []}
    batches: list[list[Event]] = [[]]
    for number, (kind, index, value) in enumerate(steps):
        if kind == "read":
            batches.append([])
        if index not in outputs:
            continue
        own = outputs[index]
        if kind == "token":
            own.append((number, str(value)))
            batches[-1].append(token(number, str(value), index))
        elif kind == "rewind" and own and isinstance(value, int):
            gone = own[-value:]
            del own[-value:]
            batches[-1].append(Rewind("r", index, len(gone), sum(len(text) for _, text in gone)))
        elif kind == "fork" and len(outputs) < 3:
            child = len(outputs)
            outputs[child] = list(own)
            batches[-1].append(Forked("r", child, index, len(own), "".join(text for _, text in own)))
    batches.append([Finished("r", index, text="." if index else "") for index in outputs])
    return batches


@given(STEPS, st.sampled_from([RewindPolicy.HOLD, RewindPolicy.EVENT]), st.sampled_from([None, 4]))
def test_deltas_add_up_to_the_output(
    steps: list[tuple[str, int, object]], policy: RewindPolicy, announced: int | None
) -> None:
    collector = OutputCollector(request(Controlled(announced), logprobs=0))
    reader = DeltaReader(collector, policy)
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    for batch in play(steps):
        collector.add(batch)
        try:
            deltas = reader.read()
        except ControllerError:
            assert (announced, policy) == (4, RewindPolicy.HOLD)
            return
        for delta in deltas:
            assert delta.is_first == (delta.index not in texts)
            text, known = texts.get(delta.index, ""), tokens.get(delta.index, [])
            assert policy is RewindPolicy.EVENT or delta.taken_tokens == delta.taken_chars == 0
            assert delta.start == len(known) - delta.taken_tokens
            assert len(delta.logprobs) == len(delta.tokens)
            texts[delta.index] = text[: len(text) - delta.taken_chars] + delta.text
            tokens[delta.index] = known[: delta.start] + list(delta.tokens)
    for output in collector.output.outputs:
        assert texts[output.index] == output.text
        assert tokens[output.index] == output.token_ids


def test_a_controllers_error_tells_what_it_had_logged() -> None:
    collector = OutputCollector(request(Controlled()))
    error = ControllerError("it broke")
    collector.add([Log("r", 0, "x" * 5_000 + "at the end"), Finished("r", 0, FinishReason.ERROR, error=error)])
    with pytest.raises(ControllerError) as raised:
        raise_first_error(collector.output)
    assert raised.value.logs.endswith("xat the end") and len(raised.value.logs) == 4_096
    silent = CompletionOutput(0, error=ControllerError("it said it elsewhere"))
    silent.error.logs = "there"  # type: ignore[union-attr]
    with pytest.raises(ControllerError) as raised:
        raise_first_error(RequestOutput("r", None, [], [silent]))
    assert raised.value.logs == "there"
