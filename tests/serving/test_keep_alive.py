"""Tests that models are unloaded some time after their last request, if a client has set this time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bridle.http.ollama.keep_alive import seconds_of
from bridle.serving.models.keep_alive import KeepAlive
from bridle.serving.models.model_slot import Slot
from tests.http.harness import saying, scripted_model


class Timers:
    """Timers that fire when the test triggers them."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, call: Callable[[], None]) -> Timers:
        self.due.append((seconds, call))
        return self

    def cancel(self) -> None:
        self.due.pop()

    def run(self) -> None:
        self.due.pop()[1]()


def test_the_time_begins_when_the_last_request_ends() -> None:
    timers, emptied = Timers(), list[str]()

    async def empty(slot: Slot) -> None:
        emptied.append(slot.name)

    async def run() -> None:
        model = scripted_model(next_token=saying("x"))
        slot, keep = Slot("m", model=model, num_leases=1), KeepAlive(empty, timers)
        keep.set(slot, 300.0)
        assert not timers.due and keep.expires_at(slot) is not None  # it is used
        slot.num_leases = 0
        keep.start(slot)
        assert [seconds for seconds, _ in timers.due] == [300.0]
        keep.stop(slot)  # the next request
        assert not timers.due
        keep.start(slot)
        timers.run()
        await asyncio.sleep(0)
        assert emptied == ["m"] and keep.expires_at(slot) is None
        keep.set(slot, None)
        assert not timers.due and keep.expires_at(slot) is None
        pinned = Slot("p", model=model, is_pinned=True)
        keep.set(pinned, 1.0)
        assert not timers.due and keep.expires_at(pinned) is None
        model.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25), (60, 60.0), ("90", 90.0), (-1, None), ("-1m", None), (0, 0.0)],
)
def test_durations(value: object, seconds: float | None) -> None:
    assert seconds_of(value) == seconds
