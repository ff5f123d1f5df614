"""What a request is about, and what becomes of it, is the same on the other side of a replica's socket."""

from __future__ import annotations

from array import array

import pytest

from bridle.cluster.replica_messages import (
    Events,
    frame,
    pack_event,
    pack_request,
    read_by_replica,
    read_by_router,
    unpack_event,
    unpack_request,
)
from bridle.outputs import Embedded, Event, Finished, FinishReason, PromptEvent, Usage
from tests.engine.support import make_request


def test_terms_and_traces_go_along() -> None:
    request = make_request(priority=-3, deadline=12.5, embeds=True, metadata={"traceparent": "00-ab"}, max_tokens=1)
    message = read_by_replica(frame(pack_request(request))[4:])
    assert unpack_request(message) == request  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "event",
    [
        PromptEvent("r", 0, (1, 2), 1, (), queued=0.5, opening=0.25),
        Embedded("r", 0, array("f", [0.5, -0.25, 1e-9])),
        Finished("r", 0, FinishReason.DEADLINE, Usage(3), held=0.125),
    ],
)
def test_times_and_vectors_come_back(event: Event) -> None:
    message = read_by_router(frame(Events([pack_event(event)]))[4:])
    assert isinstance(message, Events)
    (back,) = [unpack_event(each) for each in message.events]
    assert back == event
    for name in ("queued", "opening", "held"):
        assert getattr(back, name, None) == getattr(event, name, None)
