"""The controller of a request as plain data, from which another process can create it.

Constraints and Wasm controllers can be sent, because both are plain descriptions. Constraints for reasoning and tool
calls can be sent too; the receiver compiles their grammar again. A policy's controller class is sent by name. The
receiver imports the class, because it accepts messages only from the operator's own server. A controller of any other
class belongs to one process and cannot be sent. The packages of the control runtime are imported only when a request
has a Wasm controller.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bridle.controllers import Controller
from bridle.controllers.beams import BeamSearch
from bridle.controllers.composition import Composed, Demand, compose, parts_of
from bridle.controllers.plugins import make_demanded
from bridle.controllers.reasoning_gate import CompiledGrammar, ReasoningThenGrammar
from bridle.controllers.thinking import ThinkingBudget
from bridle.errors import BridleError, ControllerError, InvalidRequest, ProtocolError, UnsupportedFeature
from bridle.structured_output import Constraint, parse

_FREE_FIELDS = ("end", "opening", "budget", "closing", "gap", "may_stop")


def pack_controller(controller: object | None) -> dict[str, Any] | None:
    """Return the controller as plain data. Raises `UnsupportedFeature` for a controller that exists only in this
    process."""
    if controller is None:
        return None
    if isinstance(controller, Constraint):
        return {"constraint": controller.to_dict()}
    if isinstance(controller, ReasoningThenGrammar):
        return {"free": _pack_free(controller)}
    if isinstance(controller, BeamSearch):
        return {"beams": msgspec.to_builtins(controller)}
    if isinstance(controller, Composed):
        demands = [[each.policy, each.on_failure] for each in controller.demands]
        packed = {"composed": [pack_controller(part) for part in controller.parts]}
        return {**packed, "demands": demands} if demands else packed
    if isinstance(controller, ThinkingBudget):
        return {"thinking": [controller.opening, controller.closing, controller.budget, *controller.sentence]}
    if isinstance(controller, Controller) and controller.made_from is not None:
        return {"demanded": list(controller.made_from)}
    kind = type(controller).__name__
    if kind == "WasmController":
        return {"wasm": msgspec.to_builtins(controller)}
    raise UnsupportedFeature(
        f"a {kind} cannot be sent to a replica; only constraints, Wasm controllers and policies can. Serve the model "
        "with one replica",
        "controller",
    )


def is_repeatable(controller: object | None) -> bool:
    """Return whether generating an output again under this controller gives the same output. For controllers written by
    users the result is False, because their code may behave differently each time."""
    return all(isinstance(part, (Constraint, ReasoningThenGrammar, ThinkingBudget)) for part in parts_of(controller))


def form_to_compile(plain: dict[str, Any] | None) -> Constraint | None:
    """Return the constraint that must be compiled before the controller can be unpacked; None for most controllers. At
    most one constraint of a request needs compiling."""
    for part in plain.get("composed", [plain]) if plain else ():
        form = part.get("free", {}).get("then")
        if form is not None:
            return parse(form)
    return None


def unpack_controller(plain: dict[str, Any] | None, grammar: CompiledGrammar | None = None) -> object | None:
    """Create the controller from plain data. `grammar` is the compiled constraint from `form_to_compile`. Raises
    `ProtocolError` if `plain` does not describe a controller."""
    match plain:
        case None:
            return None
        case {"composed": list() as parts, "demands": [_, *_] as demands}:
            made = tuple(unpack_controller(part, grammar) for part in parts)
            return Composed(made, tuple(Demand(policy, on_failure) for policy, on_failure in demands))
        case {"composed": list() as parts}:
            return compose(*(unpack_controller(part, grammar) for part in parts))
        case {"thinking": [int() as opening, int() as closing, int() as budget, *sentence]} if _are_tokens(sentence):
            return ThinkingBudget(opening, closing, budget, tuple(sentence))
        case {"demanded": [str() as place, argument]}:
            return _make_demanded(place, argument)
        case {"constraint": dict() as form}:
            return parse(form)
        case {"beams": dict() as form}:
            return _unpack_beams(form)
        case {"wasm": dict() as form}:
            return _unpack_wasm(form)
        case {"free": dict() as form}:
            return _unpack_free(form, grammar)
        case _:
            raise ProtocolError(f"got a controller of unknown kind {next(iter(plain), '')!r}")


def _pack_free(part: ReasoningThenGrammar) -> dict[str, Any]:
    then = None if part.then is None else part.then.form.to_dict()
    return {name: getattr(part, name) for name in _FREE_FIELDS} | {"then": then}


def _unpack_free(form: dict[str, Any], grammar: CompiledGrammar | None) -> ReasoningThenGrammar:
    try:
        closing, gap = tuple(form["closing"]), tuple(form["gap"])
        return ReasoningThenGrammar(
            form["end"], form["opening"], form["budget"], closing, gap, grammar, form["may_stop"]
        )
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"got a malformed reasoning constraint: {error!r}") from None


def _are_tokens(values: list[object]) -> bool:
    return all(isinstance(each, int) for each in values)


def _unpack_beams(form: dict[str, Any]) -> BeamSearch:
    try:
        return msgspec.convert(form, BeamSearch)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ProtocolError(f"got an invalid beam search: {error}") from error


def _make_demanded(place: str, argument: Any) -> Controller:
    """Create the controller of a policy. If the creation fails, return a controller that raises the error when it
    starts."""
    try:
        return make_demanded(place, argument)
    except BridleError as error:
        return _Unmade(error)


class _Unmade(Controller):
    """Substitute for a policy's controller that could not be created; it raises the error when it starts."""

    def __init__(self, error: BridleError) -> None:
        self._error = error

    def start(self, prompt: tuple[int, ...]) -> None:
        raise ControllerError(str(self._error))


def _unpack_wasm(form: dict[str, Any]) -> object:
    from bridle.aici.client.reference import WasmController

    try:
        return msgspec.convert(form, WasmController)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"got a malformed Wasm controller: {error}") from None
