"""Runs a traced request again: the same prompt, parameters, seed and controller, perhaps with another controller.

The request is made of the trace alone, and not by `InProcessServing`: defaults, terms and policies of now would make it
another one. A module that was asked for by a name is taken by its hash: names move.
"""

from __future__ import annotations

from collections.abc import Callable

from bridle.errors import InvalidRequest
from bridle.outputs import Traced
from bridle.serving.lifecycle.request_handle import run
from bridle.serving.models.loading import LoadedModel
from bridle.serving.requests.prompts import build_request
from bridle.serving.tracing.trace_header import controller_of, modules_of, ran_form, sampling_of, traces_of
from bridle.traces import TokenRecord, Trace


def replay(
    model: LoadedModel,
    trace: Trace,
    *,
    controller: object | None = None,
    adapter: str | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> Trace:
    """The trace of another run of the request recorded in `trace`; `controller` steers it in place of the recorded one,
    and `adapter` is the name of its adapter here; `on_token` is called for each token that the new run has recorded.
    Raises `InvalidRequest` if it cannot be asked for again: also if a module that steered it is gone."""
    header = trace.header
    if header.num_media:
        raise InvalidRequest(f"the request had {header.num_media} images, which a trace does not keep", "TRACE")
    if header.adapter is not None and adapter is None:
        raise InvalidRequest("the request was made with an adapter; give its path with --adapter", "adapter")
    if controller is None:
        check_modules(model, trace)
        controller = controller_of(ran_form(trace))
    request = build_request(
        model,
        header.prompt,
        sampling_of(header.sampling),
        controller=controller,
        adapter=adapter,
        trace=True,
    )
    with run(model.client, request, header.text) as running:
        for events in running:
            for event in events:
                if isinstance(event, Traced) and isinstance(event.record, TokenRecord):
                    on_token()
        (made,) = traces_of(model, [running.output])  # it was asked for
    return made


# -- modules -------------------------------------------------------------------------------------------------


def check_modules(model: LoadedModel, trace: Trace) -> None:
    """Raise `InvalidRequest` unless the modules that steered a request are still there."""
    for name, module in modules_of(trace):
        if _meaning(model, module) == "":
            raise InvalidRequest(
                f"the request was steered by module {module}{_called(name, module)}, which is no longer in the store "
                "here; upload it, or bring another controller",
                "controller",
            )


def moved_names(model: LoadedModel, trace: Trace) -> list[str]:
    """A sentence for each name of a controller that means another module now than it did for the request."""
    told = []
    for name, module in dict.fromkeys(modules_of(trace)):
        now = module if name == module else _meaning(model, name)
        if now is not None and now != module:
            means = f"module {now}" if now else "nothing"
            told.append(f"The name {name!r} means {means} now; the request was steered by {module}, which is run.")
    return told


def _meaning(model: LoadedModel, name: str) -> str | None:
    """The module that a name or a hash means now; "" if there is none, None if nobody here can tell."""
    from bridle.serving.controller_runtime import find_module

    return None if model.control is None else find_module(model.control, name)


def _called(name: str, module: str) -> str:
    return "" if name == module else f" ({name!r} then)"
