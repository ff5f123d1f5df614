"""Tests of explanations of a handmade trace, in which every number is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridle.cli import main
from bridle.traces import (
    ChunkRecord,
    Cost,
    Draw,
    EndRecord,
    ForkRecord,
    Odds,
    PromptRecord,
    ReplacedRecord,
    RewindRecord,
    TokenRecord,
    Trace,
    TraceHeader,
    WaitRecord,
    schema,
    write,
)
from bridle.traces.explain import explain

COST = Cost(2, 3, 0.010, 0.002, 0.001)
FOUGHT = Draw(
    Odds(-4.0, 9, ((5, -0.25), (6, -2.0)), ("yes", "no")), Odds(-1.0, 1, ((7, -1.0), (8, -2.0)), ("up", "of")), 12, 0.75
)
MILD = Draw(Odds(-1.0, 1, ((5, -1.0),), ("yes",)), Odds(-0.9, 1, ((5, -0.9),), ("yes",)), 90, 0.05)


@pytest.fixture
def trace() -> Trace:
    header = TraceHeader("abc", model="demo", controller={"name": "grumpy"})
    return Trace(
        header,
        [
            PromptRecord(0, 1, [1, 2, 3], ["a", "b", "c"], 2, queued=0.5, opening=0.25),
            ChunkRecord(0, 1, 2, 1, 0, COST),
            TokenRecord(0, 1, 0, 7, "up", "up", draw=FOUGHT, answer=0.004, cost=COST),
            TokenRecord(0, 2, 1, 5, "yes", "yes", draw=MILD, answer=0.016, cost=COST, drafted=True),
            TokenRecord(0, 2, 2, 6, "no", "no", forced=True, by="grumpy"),
            ForkRecord(1, 2, 0, 3),
            WaitRecord(0, 3, False, ("x",), 3, 0.030),
            WaitRecord(1, 3, True, (), 2, 0.020),
            RewindRecord(0, 4, 2, 5),
            ReplacedRecord(1, 4, 9, "z", "grumpy", MILD),
            ChunkRecord(1, 5, 0, 4, 3, COST),
            EndRecord(1, 5, "stop"),
            EndRecord(0, 6, "length", num_cut=4),
        ],
    )


def test_everything_is_counted(trace: Trace) -> None:
    found = explain(trace)
    assert (found.num_prompt, found.num_cached, found.num_again) == (3, 2, 3)
    assert [(each.index, each.parent, each.ended) for each in found.outputs] == [(0, None, "length"), (1, 0, "stop")]
    first, second = found.outputs
    counts = (first.num_sampled, first.num_forced, first.num_drafted, first.num_rewound, first.num_replaced)
    assert counts == (2, 1, 1, 2, 0)
    assert second.num_replaced == 1
    assert [(fight.at, fight.wanted, fight.taken) for fight in found.fights] == [(0, "yes", 0.75), (1, "yes", 0.05)]
    assert found.num_bits == pytest.approx((3.0 + 0.1) / 0.6931, rel=1e-3)
    assert found.answer == pytest.approx(0.020)
    assert (found.num_steps, found.forward) == (3, pytest.approx(0.030))


def test_sentences_say_what_happened(trace: Trace) -> None:
    said = " ".join(explain(trace).sentences)
    for part in (
        "2 outputs from 3 prompt tokens, 2 of them cached: 2 tokens sampled (1 of them drafted) and 1 token forced by "
        "grumpy.",
        "A mask overruled the model at 2 tokens, most strongly at token 0 of output 0: it removed 75.0 % of the "
        "probability, the model preferred 'yes' (77.9 %) and got 'up' (1.8 %).",
        "grumpy took 20.0 ms for its answers, the longest 16.0 ms before token 1.",
        "It was late in 2 steps.",
        "It waited 1 time for x, 30.0 ms in all.",
        "Wasted: 2 tokens rolled back, 1 token replaced as soon as sampled, 3 tokens computed again.",
        "4 records are missing",
    ):
        assert part in said


def test_a_plain_trace_says_little() -> None:
    said = " ".join(explain(Trace(TraceHeader("a"), [EndRecord(0, 1, "stop")])).sentences)
    assert "No work was wasted." in said
    assert "mask" not in said


def test_the_command_explains_a_trace(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write([trace, trace], path)
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("Where a mask overruled the model (2 of 2)") == 2
    assert "abc on demo" in out
    assert main(["explain", str(path), "--top", "1", "--no-tokens"]) == 0
    out = capsys.readouterr().out
    assert "(1 of 2)" in out
    assert "rewound" not in out


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


def test_a_trace_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    evil = "\x1b]0;gone\x07"
    write(
        [
            Trace(
                TraceHeader(evil, model=evil),
                [TokenRecord(0, 1, 0, 1, evil, evil, draw=FOUGHT), EndRecord(0, 1, "stop")],
            )
        ],
        path,
    )
    assert main(["explain", str(path)]) == 0
    assert "\x1b]" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [([], "explain takes the file of a TRACE"), (["nothing.jsonl"], "there is no trace file nothing.jsonl")],
)
def test_what_is_no_file_is_a_mistake(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    assert why in capsys.readouterr().err
