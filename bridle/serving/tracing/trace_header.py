"""The header of a trace: the request, in a form that can be stored and repeated.

Constraints and Wasm controllers can be stored and repeated. Controllers of other kinds are code of one process. For
controllers that are code of a process, only the name is stored, and a replay needs their code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from bridle import __version__
from bridle.distributed.codec.controllers import pack_controller, unpack_controller
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, ProtocolError, UnsupportedFeature
from bridle.sampling import DEFAULT_SAMPLING, SamplingParams
from bridle.traces import EndRecord, Trace, TraceHeader

if TYPE_CHECKING:
    from bridle.engine.interfaces import ExecutorInfo
    from bridle.outputs import RequestOutput
    from bridle.serving.models.loading import LoadedModel

#: Fields of the engine's info that affect numbers, or where a text ends.
_ENGINE = ("model", "dtype", "device", "vocab_size", "max_model_len", "eos_token_ids")


def new_trace(request: Request, text: str | None = None, info: ExecutorInfo | None = None) -> Trace:
    """Return an empty trace of a request. `text` is the text of the request's prompt."""
    header = TraceHeader(
        request.id,
        prompt=list(request.prompt),
        text=text,
        sampling=sampling_form(request.sampling),
        controller=controller_form(request),
        adapter=request.adapter,
        num_media=len(request.media),
        bridle=__version__,
        made=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    trace = Trace(header)
    if info is not None:
        name_engine(trace, info.model, info)
    return trace


def name_engine(trace: Trace, model: str, info: ExecutorInfo) -> None:
    """Record the engine that computed the request."""
    trace.header.model = model
    trace.header.engine = {name: getattr(info, name) for name in _ENGINE} | {"eos_token_ids": list(info.eos_token_ids)}


def traces_of(model: LoadedModel, outputs: Iterable[RequestOutput]) -> list[Trace]:
    """Return the traces of outputs that have ended, with the data of their engine."""
    traces = [output.trace for output in outputs if output.trace is not None]
    for trace in traces:
        name_engine(trace, model.name, model.info)
        trace.header.chat_format = model.chat_format
    return traces


# -- sampling ------------------------------------------------------------------------------------------------


def sampling_form(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, as JSON values."""
    changed = {
        each.name: getattr(sampling, each.name)
        for each in fields(SamplingParams)
        if getattr(sampling, each.name) != getattr(DEFAULT_SAMPLING, each.name)
    }
    if "logit_bias" in changed:  # JSON has no infinity
        bias = changed["logit_bias"].items()
        changed["logit_bias"] = {str(token): None if math.isinf(addend) else addend for token, addend in bias}
    form: dict[str, Any] = msgspec.to_builtins(changed)
    return form


def sampling_of(form: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters from their JSON form. Raises `InvalidRequest`."""
    values = dict(form)
    if unknown := values.keys() - {each.name for each in fields(SamplingParams)}:
        raise InvalidRequest(f"the trace has an unknown sampling parameter {min(unknown)!r}", "TRACE")
    try:
        if "logit_bias" in values:
            bias = values["logit_bias"].items()
            values["logit_bias"] = {int(token): -math.inf if addend is None else addend for token, addend in bias}
        known: SamplingParams = msgspec.convert(values, SamplingParams)
    except (msgspec.ValidationError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"the trace has invalid sampling parameters: {error}", "TRACE") from None
    return known


# -- controllers ---------------------------------------------------------------------------------------------


def controller_form(request: Request) -> dict[str, Any] | None:
    """Return the stored form and the name of a request's controller. If the controller cannot be stored, only its name
    is returned. The user of the request is left out."""
    if request.controller is None:
        return None
    try:
        form = pack_controller(request.controller) or {}
    except UnsupportedFeature:
        form = {}
    for part in form.get("composed", [form]):
        if "wasm" in part:
            part["wasm"] = {
                name: value for name, value in part["wasm"].items() if name != "auth" and value is not False
            }
    return {"name": request.controller_name, **form}


def modules_of(trace: Trace) -> tuple[tuple[str, str], ...]:
    """Return the names of the Wasm controllers that steered a request, each with the hash of the module that the name
    meant at that time."""
    return next((record.modules for record in trace.records if isinstance(record, EndRecord) and record.modules), ())


def ran_form(trace: Trace) -> dict[str, Any] | None:
    """Return the stored form of a request's controller, with hashes of modules in place of names where they are
    known."""
    form, meant = trace.header.controller, list(modules_of(trace))
    if form is None or not meant:
        return form
    parts = [_ran_part(part, meant) for part in form.get("composed", [form])]
    return {**form, "composed": parts} if "composed" in form else parts[0]


def _ran_part(part: dict[str, Any], meant: list[tuple[str, str]]) -> dict[str, Any]:
    """Return one part of a controller with the hash of its module. `meant` is a list with an entry for each part, in
    order."""
    name = part.get("wasm", {}).get("module")
    known = next((each for each in meant if each[0] == name), None)
    if known is None:
        return part
    meant.remove(known)
    return {**part, "wasm": {**part["wasm"], "module": known[1]}}


def controller_of(form: Mapping[str, Any] | None) -> object | None:
    """Return the controller of a traced request. Raises `InvalidRequest` if the controller was code of the process that
    ran it."""
    if form is None:
        return None
    plain = {key: value for key, value in form.items() if key != "name"}
    if not plain:
        raise InvalidRequest(
            f"the request's controller {form.get('name')} was Python code of the process that recorded the trace; "
            "give a controller of your own",
            "TRACE",
        )
    try:
        return unpack_controller(plain)
    except ProtocolError as error:
        raise InvalidRequest(f"cannot read the controller recorded in this trace: {error}", "TRACE") from None
