"""Runs a traced request again with the same prompt, parameters and seed, and with the same or another controller.

The request is built only from the trace, because current defaults, limits and policies would change it. Modules are
identified by their hashes, because names can change.
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
    """Run the request recorded in `trace` again, and return the trace of the new run. `controller` replaces the
    recorded controller. `adapter` is the name that the request's adapter has in this model. `on_token` is called for
    each token that the new run records. Raises `InvalidRequest` if the request cannot be repeated, for example because
    one of its modules was removed."""
    header = trace.header
    if header.num_media:
        raise InvalidRequest(
            f"the request had {header.num_media} images, and a trace has no images: it cannot be replayed", "TRACE"
        )
    if header.adapter is not None and adapter is None:
        raise InvalidRequest("the request used an adapter; give the adapter's path with --adapter", "adapter")
    if controller is None:
        check_modules(model, trace)
        controller = controller_of(ran_form(trace))
    request = build_request(
        model, header.prompt, sampling_of(header.sampling), controller=controller, adapter=adapter, trace=True
    )
    with run(model.client, request, header.text) as running:
        for events in running:
            for event in events:
                if isinstance(event, Traced) and isinstance(event.record, TokenRecord):
                    on_token()
        (made,) = traces_of(model, [running.output])  # exactly one trace, which the request asked for
    return made


# -- modules -------------------------------------------------------------------------------------------------


def check_modules(model: LoadedModel, trace: Trace) -> None:
    """Raise `InvalidRequest` if a module of the request is not in the store any more."""
    for name, module in modules_of(trace):
        if _meaning(model, module) == "":
            raise InvalidRequest(
                f"the request's controller is module {module}{_called(name, module)}, which is not stored on this "
                "machine any more; upload it, or give another controller",
                "controller",
            )


def moved_names(model: LoadedModel, trace: Trace) -> list[str]:
    """Return a sentence for each controller name that now means another module than in the trace."""
    told = []
    for name, module in dict.fromkeys(modules_of(trace)):
        now = module if name == module else _meaning(model, name)
        if now is not None and now != module:
            means = f"module {now}" if now else "nothing"
            told.append(f"The name {name!r} means {means} now; the request was controlled by {module}, which is run.")
    return told


def _meaning(model: LoadedModel, name: str) -> str | None:
    """Return the current module for a name or a hash. The result is "" if there is no such module, and None if this is
    unknown."""
    from bridle.serving.controller_runtime import find_module

    return None if model.control is None else find_module(model.control, name)


def _called(name: str, module: str) -> str:
    return "" if name == module else f" ({name!r} then)"
