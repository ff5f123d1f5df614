"""Tests that a request and its result are equal on both sides of a replica's socket."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle import outputs
from bridle.distributed import replica_messages
from bridle.distributed.replica_messages import (
    Events,
    Submit,
    frame,
    pack_event,
    pack_request,
    read_by_replica,
    read_by_router,
    unpack_event,
    unpack_request,
)
from bridle.engine.multimodal.multimodal_inputs import MediaArray, MultiModalItem, PlaceholderRange
from bridle.engine.request import Request
from bridle.errors import BridleError, ContextOverflow, ControllerError, InvalidRequest, MediaRefused
from bridle.outputs import Embedded, Event, Finished, FinishReason, PromptEvent, Traced, Usage
from bridle.sampling import SamplingParams
from bridle.sampling_values import LogitBias
from tests.engine.support import make_request
from tests.traces.records import RECORDS


def test_terms_and_traces_go_along() -> None:
    request = make_request(
        priority=-3, deadline=12.5, embeds=True, metadata={"traceparent": "00-ab"}, max_tokens=1, trace=True
    )
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


FLOATS = st.floats(allow_nan=False, width=32)
ERRORS = st.one_of(
    st.none(),
    st.builds(InvalidRequest, st.text(max_size=9), st.none() | st.text(max_size=9)),
    st.builds(ControllerError, st.text(max_size=9)),
    st.builds(ContextOverflow, st.text(max_size=9), st.just("prompt")),
)
st.register_type_strategy(int, st.integers(-(1 << 63), (1 << 63) - 1))  # as MessagePack has them
st.register_type_strategy(BridleError, ERRORS.filter(lambda error: error is not None))
st.register_type_strategy(float, st.floats(allow_nan=False))  # which equals nothing, itself neither
#: The first one's type is none before Python 3.12; of the second there are many kinds.
KINDS = [kind for kind in replica_messages.FORM_OF if kind not in (Embedded, Traced)]


def sent(event: Event) -> Event:
    message = read_by_router(frame(Events([pack_event(event)]))[4:])
    assert isinstance(message, Events)
    return unpack_event(message.events[0])


RECORDED = st.builds(Traced, st.text(max_size=9), st.integers(0, 9), RECORDS)
VECTORS = st.builds(Embedded, st.text(max_size=9), st.integers(0, 9), st.builds(array, st.just("f"), st.lists(FLOATS)))


@given(st.sampled_from(KINDS).flatmap(st.from_type) | VECTORS | RECORDED)
def test_every_event_comes_back(event: Event) -> None:
    back = sent(event)
    assert type(back) is type(event)
    for each in fields(event):
        ours, theirs = getattr(event, each.name), getattr(back, each.name)
        if isinstance(ours, BridleError):
            ours, theirs = (type(ours), str(ours)), (type(theirs), str(theirs))
        assert theirs == ours


def test_every_kind_of_event_has_a_form() -> None:
    """Every class of events can be sent, even if Python has not yet freed the version of a class without slots."""
    defined = {each for each in vars(outputs).values() if isinstance(each, type) and issubclass(each, Event)}
    assert set(replica_messages.FORM_OF) == defined - {Event}


@pytest.mark.parametrize("kind", replica_messages.FORM_OF)
def test_events_keep_their_names_and_fields(kind: type[Event]) -> None:
    form = replica_messages.FORM_OF[kind]
    assert form.message.__name__ == kind.__name__
    assert form.message.__struct_fields__ == tuple(field.name for field in fields(kind))


def test_an_event_with_a_new_field_travels() -> None:
    """A new field of an event is sent without any further code."""

    @dataclass(slots=True)
    class Moved(PromptEvent):
        where: str = ""
        error: BridleError | None = None

    Moved.__annotations__.update(where=str, error=BridleError | None)
    form = replica_messages.Form(Moved)
    data = replica_messages.encode(form.pack(Moved("r", 1, (1, 2), where="there", error=ControllerError("gone"))))
    back = form.unpack(msgspec.msgpack.decode(data, type=form.message))
    assert isinstance(back, Moved)
    assert (back.request_id, back.tokens, back.where, str(back.error)) == ("r", (1, 2), "there", "gone")


def test_packed_biases_go_along() -> None:
    bias = {token: token / 8 for token in range(1_000)}
    request = Request("r", (1,), SamplingParams(logit_bias=bias))
    assert isinstance(request.sampling.logit_bias, LogitBias)
    message = read_by_replica(frame(pack_request(request))[4:])
    assert isinstance(message, Submit)
    assert unpack_request(message).sampling.logit_bias == bias


def test_pictures_go_along_within_a_limit() -> None:
    numbers = MediaArray("pixel_values", "float32", (1, 2), bytes(8))
    medium = MultiModalItem(b"k" * 16, (numbers,), 2)
    request = Request("r", (1, 2, 2), media=(medium,), runs=(PlaceholderRange(1, 2, medium.key, grid=(1, 1, 2)),))
    message = read_by_replica(frame(pack_request(request))[4:])
    assert isinstance(message, Submit)
    assert unpack_request(message) == request
    huge = replace(medium, arrays=(replace(numbers, data=bytes(replica_messages.MAX_MEDIA_BYTES + 1)),))
    with pytest.raises(MediaRefused, match="can be sent to a replica"):
        pack_request(replace(request, media=(huge,)))
