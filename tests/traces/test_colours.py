"""Tests of coloured tokens: no token is left out, and hostile texts do not become markup."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bridle.outputs import CompletionOutput, RequestOutput
from bridle.traces import (
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
)
from bridle.traces.highlight import html_of, spans
from bridle.traces.replay_text import rebuild
from tests.engine.random_labs import random_lab, random_request, run_staggered
from tests.engine.support import replay
from tests.traces.records import HOSTILE, Reader


@given(st.integers(0, 1 << 40))
def test_colours_leave_nothing_out(seed: int) -> None:
    random = Random(seed)
    lab = random_lab(random, random.choice(["paged", "sequences"]))
    requests = [random_request(random, trace=True) for _ in range(2)]
    run_staggered(lab, requests, random)
    for request_id, told in replay(lab.events).items():
        trace = Trace(TraceHeader(request_id), told.records)
        for output in rebuild(trace):
            kept = [each for each in spans(trace, output.index, prompt=False) if each.origin != "rewound"]
            assert "".join(each.text for each in kept) == output.text


def made(*texts: str) -> Trace:
    draw = Draw(Odds(-0.5, 1, ((1, -0.5), (2, -1.0)), texts[:2]), None)
    records = [PromptRecord(0, 1, [1, 2], ["cached ", "prompt "], 1)]
    tokens = [TokenRecord(0, 1, at, at, text, text, draw=draw) for at, text in enumerate(texts)]
    return Trace(TraceHeader("a"), [*records, *tokens, EndRecord(0, 2, "stop")])


def test_each_token_has_the_colour_of_its_origin() -> None:
    fought = Draw(Odds(-9.0, 5), Odds(0.0, 1), 1, 0.9)
    trace = made("a", "b")
    trace.records[3:3] = [
        RewindRecord(0, 2, 1, 1),
        TokenRecord(0, 2, 1, 7, "f", "f", forced=True, by="me"),
        TokenRecord(0, 2, 2, 8, "g", "g", draw=fought),
        ReplacedRecord(0, 3, 9, "r"),
        ForkRecord(1, 3, 0, 2),
    ]
    found = [(each.text, each.origin) for each in spans(trace)]
    assert found[:2] == [("cached ", "cached"), ("prompt ", "prompt")]
    assert ("r", "rewound") in found
    assert ("f", "forced") in found
    assert ("g", "fought") in found
    assert [each.text for each in spans(trace, 1, prompt=False)] == ["a", "f", "g"]


def test_a_hostile_text_stays_text() -> None:
    trace = made(HOSTILE, "b")
    output = CompletionOutput(0, HOSTILE + "b")
    for told in (trace, None):
        page = RequestOutput("a", HOSTILE, [1], [output], trace=told)._repr_html_()
        reader = Reader()
        reader.feed(page)
        assert reader.tags <= {"div", "span"}
        assert reader.names <= {"style", "title", "data-output"}
        assert HOSTILE in reader.text


def test_a_page_is_bounded() -> None:
    trace = made("a" * 300_000, "b")
    assert len(html_of(spans(trace))) < 210_000
