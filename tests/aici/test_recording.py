"""Tests of recording a control runtime's messages to a trace: messages are in order, and the trace's size is
limited."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.aici.client.recording import TraceWriter
from bridle.traces import EndRecord, ExchangeRecord, TraceHeader, read
from bridle.traces.explain import explain

HEADER = TraceHeader("runtime-1", runtime={"dialect": 2})


def exchanges_in(path: Path) -> list[ExchangeRecord]:
    (trace,) = read(path)
    return [record for record in trace.records if isinstance(record, ExchangeRecord)]


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (b'{"op":"ping"}', {"op": "ping"}),
        (b'{\n "op": "a\\nb"\n}\n', {"op": "a\nb"}),  # one line in the file
        (b"no {json", "no {json"),
        (b"\xff\n", "\ufffd\n"),
        (b"", ""),
    ],
)
def test_a_message_is_kept_as_it_was(tmp_path: Path, message: bytes, kept: object) -> None:
    writer = TraceWriter(tmp_path / "a.jsonl", HEADER)
    writer.sent(message, side=False)
    writer.received(message, side=False)
    writer.close()
    writer.close()
    (exchange,) = exchanges_in(tmp_path / "a.jsonl")
    assert (exchange.request, exchange.reply, exchange.side, exchange.step) == (kept, kept, False, 0)


def test_replies_at_the_side_find_their_requests(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "a.jsonl", HEADER)
    for rid in "ab":
        writer.sent(b'{"op":"get_tags","$rid":"%s"}' % rid.encode(), side=True)
    writer.sent(b'{"op":"ping"}', side=False)
    writer.received(b'{"type":"ok","$rid":"b"}', side=True)
    writer.received(b'{"type":"error"}', side=False)
    writer.received(b'{"type":"ok","$rid":"unknown"}', side=True)
    writer.received(b'{"type":"ok","$rid":"a"}', side=True)
    writer.close()
    told = [
        (each.request.get("$rid"), each.reply.get("$rid"), each.side) for each in exchanges_in(tmp_path / "a.jsonl")
    ]
    assert told == [("b", "b", True), (None, None, False), ("a", "a", True)]
    (sentence,) = explain(next(read(tmp_path / "a.jsonl"))).sentences
    assert sentence.startswith("3 exchanges with the control runtime in ")
    assert "of which 1 were answered with an error; the longest took " in sentence


@given(sizes=st.lists(st.integers(0, 400), max_size=20), most=st.integers(0, 3_000))
def test_a_file_is_bounded_and_says_what_is_missing(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int
) -> None:
    """The kept part is the complete beginning, so that it can be replayed."""
    path = tmp_path_factory.mktemp("recorded") / "a.jsonl"
    writer = TraceWriter(path, HEADER, max_bytes=most)
    for number, size in enumerate(sizes):
        writer.sent(b'{"op":"%d %s"}' % (number, b"x" * size), side=False)
        writer.received(b'{"type":"ok"}', side=False)
    writer.close()
    assert path.stat().st_size <= most
    if not path.stat().st_size:
        return
    (trace,) = read(path)
    *kept, end = trace.records
    assert [int(each.request["op"].split()[0]) for each in kept if isinstance(each, ExchangeRecord)] == list(
        range(len(kept))
    )
    assert isinstance(end, EndRecord)
    assert end.num_cut == trace.num_cut == writer.num_cut == len(sizes) - len(kept)


def test_several_traces_share_a_file_and_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for _ in range(3):
        writer = TraceWriter(path, HEADER, max_bytes=1_100)
        writer.sent(b'{"op":"ping"}', side=False)
        writer.received(b'{"type":"ok"}', side=False)
        writer.close()
    assert path.stat().st_size <= 1_100
    made = list(read(path))
    assert [len(trace.records) for trace in made] == [2] * len(made)
    assert 0 < len(made) < 3


def test_threads_may_record_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = TraceWriter(path, HEADER)

    def talk(name: str) -> None:
        for number in range(50):
            writer.sent(b'{"op":"x","$rid":"%s%d"}' % (name.encode(), number), side=True)
            writer.received(b'{"type":"ok","$rid":"%s%d"}' % (name.encode(), number), side=True)

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    told = exchanges_in(path)
    assert sorted(each.step for each in told) == list(range(200))
    assert all(each.request["$rid"] == each.reply["$rid"] for each in told)
