"""Tests that a client that does not read costs bounded memory, and misses no token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine import AsyncEngine, Engine
from bridle.engine.client import MAX_LOG_CHARS, MAX_NOTE_BYTES, EventBuffer
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import StoredValue
from bridle.errors import ControllerError
from bridle.outputs import Event, Finished, FinishReason, Log, Stored, TokenEvent
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.support import make_request
from tests.fakes.controller_runtime import FakeControllerPool, Reply, View

_notes = st.one_of(
    st.builds(TokenEvent, st.just("r"), st.integers(0, 2), st.integers(0, 9)),
    st.builds(Log, st.just("r"), st.integers(0, 2), st.text(max_size=4)),
    st.builds(Stored, st.just("r"), st.integers(0, 2), st.sampled_from("xyz"), st.binary(max_size=4), st.booleans()),
)


def told(events: list[Event]) -> tuple[dict[str, bytes], dict[int, str], list[Event]]:
    """Return a client's state after these events: variables, logs, and other events in order."""
    variables: dict[str, bytes] = {"x": b"before"}
    logs: dict[int, str] = {}
    others = []
    for event in events:
        if isinstance(event, Stored):
            before = variables.get(event.name, b"") if event.is_append else b""
            variables[event.name] = before + event.value
        elif isinstance(event, Log):
            logs[event.index] = logs.get(event.index, "") + event.text
        else:
            others.append(event)
    return variables, logs, others


@given(st.lists(st.lists(_notes, max_size=12), max_size=12))
def test_merging_changes_nothing_that_counts(batches: list[list[Event]]) -> None:
    backlog = EventBuffer(max_bytes=2_000)
    for batch in batches:
        try:
            backlog.add(batch)
        except ControllerError:
            return
    assert told(backlog.drain()) == told([event for batch in batches for event in batch])


def test_rewritten_variables_and_long_logs_are_merged() -> None:
    backlog = EventBuffer()
    for number in range(200):
        backlog.add([Stored("r", 0, "x", bytes([number]) * (1 << 20)), Log("r", 0, "a" * (1 << 17))])
        assert backlog.num_bytes <= MAX_NOTE_BYTES
    variables, logs, _ = told(backlog.drain())
    assert variables["x"] == bytes([199]) * (1 << 20)
    assert MAX_LOG_CHARS <= len(logs[0]) <= MAX_NOTE_BYTES and logs[0].startswith("[...]")


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(ControllerError, match="wait for a client that does not read; at most 4096 with 8388608"):
        EventBuffer().add(Stored("r", 0, f"v{number}", bytes(1 << 20)) for number in range(100))
    with pytest.raises(ControllerError, match="130000 logs and variables"):
        EventBuffer().add(Stored("r", 0, f"v{number}", b"") for number in range(130_000))


def test_small_pieces_count_too() -> None:
    backlog = EventBuffer(max_bytes=1 << 20)
    for _ in range(100_000):
        backlog.add([Stored("r", 0, "x", b"1", is_append=True)])
        assert len(backlog.events) < 10_000
    assert told(backlog.drain())[0]["x"] == b"before" + b"1" * 100_000


@pytest.mark.parametrize("names", [1, 1000])
def test_a_stalled_reader_keeps_little_and_is_cut(names: int) -> None:
    """If one variable is written repeatedly, the client sees the last value. If many variables are written, its request
    ends."""

    def program(view: View) -> Reply:
        name = f"v{view.num_asks % names}"
        return Reply(Decision.sample(), stored=(StoredValue(name, bytes([view.num_asks % 251]) * (1 << 20)),))

    pool = FakeControllerPool()
    engine = Engine(ScriptedExecutor(32, 64, 4, eos_token_ids=()), EngineConfig(step_timeout=5.0), pools=[pool])
    with AsyncEngine(engine) as client:
        stream = client.submit(make_request(controller=program, max_tokens=60))
        while client.num_live:
            with stream._lock:
                assert stream._backlog.num_bytes <= MAX_NOTE_BYTES
        if names > 1:
            with pytest.raises(ControllerError, match="does not read"):
                list(stream)
            return
        events = [event for batch in stream for event in batch]
    stored = [event for event in events if isinstance(event, Stored)]
    assert len(stored) < 30 and len([event for event in events if isinstance(event, TokenEvent)]) == 60
    assert stored[-1].value[0] >= 59
    last = events[-1]
    assert isinstance(last, Finished) and last.reason is FinishReason.LENGTH
