"""What steers a request as plain data, so that it can be made again in another process.

Constraints and Wasm controllers travel: both are descriptions. So do free parts (thoughts and calls of tools), whose
grammar is compiled again where they arrive. Any other Python object is code of one process and does not. The packages
of the control runtime are touched only where somebody has a Wasm controller.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bridle.constraints import Constraint, parse
from bridle.controllers.free_part import FreePart, Grammar
from bridle.errors import ProtocolError, UnsupportedFeature

_FREE_FIELDS = ("end", "opening", "budget", "closing", "gap", "may_stop")


def pack_controller(controller: object | None) -> dict[str, Any] | None:
    """Raises `UnsupportedFeature` for what exists in one process only."""
    if controller is None:
        return None
    if isinstance(controller, Constraint):
        return {"constraint": controller.to_dict()}
    if isinstance(controller, FreePart):
        return {"free": _pack_free(controller)}
    kind = type(controller).__name__
    if kind == "WasmController":
        return {"wasm": msgspec.to_builtins(controller)}
    raise UnsupportedFeature(
        f"a {kind} is an object of this process; with several replicas constraints and Wasm controllers steer, "
        "so use one replica",
        "controller",
    )


def is_repeatable(controller: object | None) -> bool:
    """Whether an output under it comes out the same when it is begun again: no code of somebody else has a say."""
    return controller is None or isinstance(controller, (Constraint, FreePart))


def form_to_compile(plain: dict[str, Any] | None) -> Constraint | None:
    """What must be compiled before the controller can be unpacked; None for most."""
    form = plain.get("free", {}).get("then") if plain else None
    return None if form is None else parse(form)


def unpack_controller(plain: dict[str, Any] | None, grammar: Grammar | None = None) -> object | None:
    """The controller again, with the `grammar` of what was to be compiled. Raises `ProtocolError` for what is none."""
    match plain:
        case None:
            return None
        case {"constraint": dict() as form}:
            return parse(form)
        case {"wasm": dict() as form}:
            return _unpack_wasm(form)
        case {"free": dict() as form}:
            return _unpack_free(form, grammar)
        case _:
            raise ProtocolError(f"a controller of the kind {next(iter(plain), '')!r} came, which is not known here")


def _pack_free(part: FreePart) -> dict[str, Any]:
    then = None if part.then is None else part.then.form.to_dict()
    return {name: getattr(part, name) for name in _FREE_FIELDS} | {"then": then}


def _unpack_free(form: dict[str, Any], grammar: Grammar | None) -> FreePart:
    try:
        closing, gap = tuple(form["closing"]), tuple(form["gap"])
        return FreePart(form["end"], form["opening"], form["budget"], closing, gap, grammar, form["may_stop"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"a free part came that is none: {error!r}") from None


def _unpack_wasm(form: dict[str, Any]) -> object:
    from bridle.aici.client.reference import WasmController

    try:
        return msgspec.convert(form, WasmController)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a Wasm controller came that is none: {error}") from None
