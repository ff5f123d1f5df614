"""Runs a traced request again: the same prompt, parameters, seed and controller, perhaps with another controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.errors import InvalidRequest
from bridle.service.collect import OutputCollector
from bridle.service.requests import build_request
from bridle.service.tracing import controller_of, name_engine, sampling_of
from bridle.traced import Trace

if TYPE_CHECKING:
    from bridle.service.loading import LoadedModel


def replay(
    model: LoadedModel,
    trace: Trace,
    *,
    controller: object | None = None,
    adapter: str | None = None,
) -> Trace:
    """The trace of another run of the request that `trace` tells of; `controller` steers it in place of the recorded
    one, and `adapter` is the name of its adapter here. Raises `InvalidRequest` if it cannot be asked for again."""
    header = trace.header
    if header.num_media:
        raise InvalidRequest(f"the request had {header.num_media} pictures, which a trace does not keep", "TRACE")
    if header.adapter is not None and adapter is None:
        raise InvalidRequest("the request was made with an adapter; say with --adapter where it is", "adapter")
    request = build_request(
        model,
        header.prompt,
        sampling_of(header.sampling),
        controller=controller_of(header.controller) if controller is None else controller,
        adapter=adapter,
        trace=True,
    )
    collector = OutputCollector(request, header.text)
    with model.client.submit(request) as stream:
        for events in stream:
            collector.add(events)
    made = collector.output.trace
    assert made is not None  # it was asked for
    name_engine(made, model.name, model.info)
    return made
