"""Tests of records that are made when they are read: they equal other records, are made once, and can be sent."""

from __future__ import annotations

import copy
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from bridle.outputs import Traced
from bridle.traces import Record, Trace, TraceHeader
from tests.traces.records import RECORDS


@given(st.lists(st.tuples(RECORDS, st.booleans()), max_size=8), st.integers(0, 8))
def test_a_trace_of_what_makes_records_is_that_of_the_records(given: list[tuple[Record, bool]], early: int) -> None:
    num_made = 0

    def later(record: Record) -> tuple[Callable[[Record], Record], Record]:
        def make(given: Record) -> Record:
            nonlocal num_made
            num_made += 1
            return given

        return make, record

    trace = Trace(TraceHeader("a"))
    for number, (record, is_late) in enumerate(given):
        if number == early:
            assert trace.records == [each for each, _ in given[:early]]
        trace.add(Traced("a", 0, later(record)).told if is_late else record)
    assert trace.num_records == len(given)
    assert num_made == sum(is_late for _, is_late in given[:early]) * (early < len(given))
    assert trace == Trace(TraceHeader("a"), [record for record, _ in given])
    assert all(first is second for first, second in zip(trace.records, trace.records, strict=True))
    assert num_made == sum(is_late for _, is_late in given)
    assert copy.copy(trace) == trace


@given(RECORDS)
def test_an_event_makes_its_record_once(record: Record) -> None:
    made: list[int] = []
    event = Traced("a", 0, (lambda: made.append(1) or record,))  # type: ignore[func-returns-value]
    assert event.record is event.record is record
    assert made == [1]
