"""Tests of replayed traces: an equal request gives an equal output, and another request reports where it diverged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bridle import LLM, Controller, Decision
from bridle.cli import main
from bridle.cli.replay import show_beside
from bridle.controllers import SequenceView
from bridle.errors import InvalidRequest
from bridle.serving.tracing.replay import replay
from bridle.structured_output import Regex
from bridle.traces import (
    Draw,
    EndRecord,
    LogRecord,
    Odds,
    Record,
    RewindRecord,
    StoredRecord,
    TokenRecord,
    Trace,
    TraceHeader,
    WaitRecord,
    parse,
)
from bridle.traces.compare import compare
from bridle.traces.format import encode_trace
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.http.harness import scripted_model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(scripted_model()) as loaded:
        yield loaded


def traced(llm: LLM, prompt: str = "one", **options: object) -> Trace:
    (output,) = llm.generate(prompt, trace=True, use_tqdm=False, max_tokens=8, **options)
    assert output.trace is not None
    (trace,) = parse(encode_trace(output.trace))  # as it is in a file
    return trace


@given(
    st.integers(0, 1 << 40), st.sampled_from([1, 3]), st.sampled_from([None, "[a-z ]+[.]"]), st.sampled_from([0.0, 1.5])
)
def test_a_trace_replays_to_the_bit(llm: LLM, seed: int, n: int, regex: str | None, temperature: float) -> None:
    old = traced(llm, seed=seed, n=n, temperature=temperature, constraint=None if regex is None else Regex(regex))
    found = compare(old, replay(llm.model, old))
    assert found.is_same and found.is_exact, found.sentences
    assert found.sentences[-1].startswith("All is the same, to the last bit")


def test_another_seed_is_told_with_its_surroundings(llm: LLM) -> None:
    old = traced(llm, seed=1, temperature=5.0)
    other = Trace(replace(old.header, sampling={**old.header.sampling, "seed": 2}), old.records)
    found = compare(old, replay(llm.model, other))
    (difference,) = found.differences
    assert difference.old is not None
    assert difference.gap is not None
    assert len(difference.before) == min(difference.number, 6)
    assert f"Output 0 differs at move {difference.number}: token " in found.sentences[0]


class Says(Controller):
    """A controller that forces the given tokens, and then stops."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def next(self, view: SequenceView) -> Decision:
        return Decision.stop() if view.generated else Decision.splice(0, self.tokens)


def test_a_controller_of_ones_own_is_brought_again(llm: LLM) -> None:
    old = traced(llm, controller=Says(65, 66))
    with pytest.raises(InvalidRequest, match="says was Python code of the process that recorded"):
        replay(llm.model, old)
    assert compare(old, replay(llm.model, old, controller=Says(65, 66))).is_same
    found = compare(old, replay(llm.model, old, controller=Says(65, 67)))
    assert [difference.number for difference in found.differences] == [1]
    assert "forced by says" in found.sentences[0]


def test_pictures_and_adapters_have_to_be_there(llm: LLM) -> None:
    old = traced(llm)
    with pytest.raises(InvalidRequest, match="had 2 images"):
        replay(llm.model, Trace(replace(old.header, num_media=2), old.records))
    with pytest.raises(InvalidRequest, match="--adapter"):
        replay(llm.model, Trace(replace(old.header, adapter="a@1"), old.records))


# -- comparing -----------------------------------------------------------------------------------------------


def made(*records: Record) -> Trace:
    return Trace(TraceHeader("a"), [*records, EndRecord(0, 9, "stop")])


def drawn(token: int, num_allowed: int | None = None, logprob: float = -0.5) -> TokenRecord:
    draw = Draw(Odds(logprob, 1, ((token, logprob), (3, -0.51))), None, num_allowed)
    return TokenRecord(0, 1, 0, token, "x", "x", draw=draw)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (made(drawn(1)), made(drawn(2)), "token 1 'x' sampled before, token 2 'x' sampled now"),
        (made(drawn(1, 5)), made(drawn(1, 6)), "sampled of 5 before, token 1 'x' sampled of 6 now"),
        (made(drawn(1)), made(drawn(1), drawn(2)), "end (stop) before, token 2 'x' sampled now"),
        (made(drawn(1), RewindRecord(0, 1, 1)), made(drawn(1)), "1 tokens rolled back before, end (stop) now"),
        (made(LogRecord(0, 1, "a")), made(LogRecord(0, 1, "b")), "Other logs: outputs 0"),
        (made(StoredRecord(0, 1, "x", b"1")), made(StoredRecord(0, 1, "x", b"2")), "Other variables: outputs 0"),
        (made(drawn(1)), Trace(TraceHeader("a"), [drawn(1)]), "end (stop) before, nothing more now"),
    ],
)
def test_what_differs_is_said(old: Trace, new: Trace, said: str) -> None:
    found = compare(old, new)
    assert not found.is_same
    assert said in " ".join(found.sentences)


def test_times_and_portions_are_no_difference() -> None:
    old = made(LogRecord(0, 1, "ab"), drawn(1), WaitRecord(0, 1, True))
    new = made(LogRecord(0, 7, "a"), LogRecord(0, 8, "b"), replace(drawn(1), step=8, answer=3.0))
    assert compare(old, new).is_same


def test_bits_are_told_apart_from_tokens() -> None:
    found = compare(made(drawn(1)), made(drawn(1, logprob=-0.5000001)))
    assert found.is_same and not found.is_exact
    assert "but for bits of log-probabilities" in found.sentences[-1]


def test_a_close_call_is_called_so() -> None:
    found = compare(made(drawn(1)), made(drawn(2)))
    assert "so close, another arithmetic decides otherwise" in found.sentences[1]


def test_what_was_broken_off_is_compared_as_far_as_it_got() -> None:
    old = Trace(TraceHeader("a"), [drawn(1), EndRecord(0, 2, "cancelled")])
    assert compare(old, made(drawn(1), drawn(2))).is_same
    assert not compare(old, made(drawn(3), drawn(2))).is_same


def test_logs_and_variables_that_differ_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    old = made(LogRecord(0, 1, "[red]a"), StoredRecord(0, 1, "x", b"1"), drawn(1))
    new = made(LogRecord(0, 1, "b"), StoredRecord(0, 1, "x", b"1"), drawn(1))
    show_beside(Console(width=100), old, new)
    out = capsys.readouterr().out
    assert "0: logs" in out and "[red]a" in out
    assert "variables" not in out


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_checkpoint("llama", tmp_path / "llama"))
    path, again = tmp_path / "one.jsonl", tmp_path / "again.jsonl"
    words = ["--temperature", "1", "--seed", "4", "--max-tokens", "6", "--no-stats", "--regex", "[a-z]{3,}"]
    assert main(["generate", folder, "hello", *words, "--kv-memory", "8MiB", "--trace", str(path)]) == 0
    capsys.readouterr()
    assert main(["replay", str(path), folder, "--kv-memory", "8MiB", "--save", str(again)]) == 0
    out = capsys.readouterr().out
    assert "All is the same" in out
    assert "requests: 1; not the same: 0" in out
    assert compare(*[next(parse(each.read_bytes())) for each in (path, again)]).is_same
    assert main(["replay", str(path), folder, "--kv-memory", "8MiB", "--regex", "[0-9]+"]) == 1
    out = capsys.readouterr().out
    assert "recorded" in out
    assert "differs at move 0" in out
    assert main(["replay", str(path), folder, "--controller", "wish.txt"]) == 2
    assert "no standard controller runs the file 'wish.txt'" in capsys.readouterr().err
