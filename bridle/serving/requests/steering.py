"""Selects the controllers of a request, by the same rules in every API: controllers by name, their arguments, and
related options.

This module uses no wire format: a front end passes the values of its fields. The optional packages of the control
runtime are imported only for a model that has a control runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bridle.aici.protocol import Auth
from bridle.controller_tools import check_client_tools
from bridle.controllers.composition import MAX_CONTROLLERS, compose
from bridle.controllers.plugins import is_class, make_controller
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.safe_repr import short_repr
from bridle.serving.models.loading import LoadedModel
from bridle.serving.outputs.stream_deltas import RewindPolicy
from bridle.serving.tenancy.keys import Identity
from bridle.structured_output.spec import Constraint, parse

if TYPE_CHECKING:
    from bridle.aici.client import RuntimePool, WasmController
    from bridle.controllers.python import Controller

#: Name of the controller that does nothing: plain generation.
NO_CONTROLLER = "none"
MAX_NAME_CHARS = 200
NO_CLASSES: Mapping[str, type[Controller]] = {}


class Named(Protocol):
    """The controller fields of a request, in every API. One field names a controller, and another field has the
    controller's argument. Further controllers are in a list field. Each controller in the list is a name, or an object
    with the fields for name and argument. Two more fields are the tools that controllers may call, and the tools whose
    calls the client answers."""

    @property
    def controller(self) -> str | None: ...

    @property
    def controller_arg(self) -> Any: ...

    @property
    def controllers(self) -> Sequence[Any] | None: ...

    @property
    def client_tools(self) -> Sequence[str] | None: ...


@dataclass(frozen=True, slots=True)
class Controllers:
    """Controllers that are given by name, for calls that do not come from a request's fields."""

    controller: str | None = None
    controller_arg: Any = None
    controllers: Sequence[Any] | None = None
    client_tools: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Steering:
    """What steers a request: its controller (possibly composed of several), its constraint, both, or neither. `rewind`
    is the policy for text that a controller may roll back. `client_tools` are the tools whose calls the client
    answers."""

    controller: object | None = None
    constraint: Constraint | None = None
    rewind: RewindPolicy = RewindPolicy.HOLD
    client_tools: tuple[str, ...] = ()


PLAIN = Steering()


def is_controlled(named: Named) -> bool:
    """Return whether a controller other than `none` is named. Raises `InvalidRequest` for malformed fields."""
    return any(True for _ in _each(named))


def ignores_eos(named: Named, given: bool | None) -> bool:
    """Return whether the end-of-text token is ignored. If the client has not `given` a value, the token is ignored only
    with a sandboxed controller, which itself decides when its output ends."""
    return any(not is_class(name) for name, _ in _each(named)) if given is None else given


class SteersRequests:
    """Base class of classes that serve requests. The class selects the controllers of requests from the client
    `identity`. `classes` are the operator's controller classes, by name."""

    __slots__ = ()
    model: LoadedModel
    identity: Identity
    classes: Mapping[str, type[Controller]]

    def steering(
        self, named: Named, constraint: Constraint | Mapping[str, Any] | None = None, rewind: str | None = None
    ) -> Steering:
        """Return the controllers that a request selects. Raises `InvalidRequest` for an unsupported combination,
        `ControllerError` for a class that fails, and `UnsupportedFeature` if the model has no control runtime."""
        form = None if constraint is None else parse(constraint)
        made = [
            make_controller(self.classes, name, argument)
            if is_class(name)
            else wasm_controller(self.model, name, argument, self.identity)
            for name, argument in _each(named)
        ]
        if not made:
            if named.client_tools:
                raise InvalidRequest(
                    "client_tools is given without a controller; set controller to one that calls the tools",
                    "client_tools",
                )
            return PLAIN if form is None else Steering(constraint=form)
        rewinds, tools = RewindPolicy(rewind or "hold"), _client_tools(named, self.model)
        return Steering(compose(*made), form, rewinds, tools)


def _client_tools(named: Named, model: LoadedModel) -> tuple[str, ...]:
    """Return the tools whose calls the client answers."""
    if not named.client_tools:
        return ()
    if model.tools is None:
        raise UnsupportedFeature(
            f"client_tools: the model {model.name!r} is served without tools for controllers", "client_tools"
        )
    return check_client_tools(named.client_tools, model.tools.names)


def _each(named: Named) -> Iterator[tuple[str, Any]]:
    """Yield the name and the argument of each controller, the outer one first."""
    if named.controller is not None and named.controller != NO_CONTROLLER:
        yield named.controller, "" if named.controller_arg is None else named.controller_arg
    elif named.controller_arg is not None:
        raise InvalidRequest("controller_arg is given without a controller; set controller", "controller_arg")
    further = named.controllers or ()
    if len(further) > MAX_CONTROLLERS:
        raise InvalidRequest(f"controllers has {len(further)} entries; at most {MAX_CONTROLLERS}", "controllers")
    for number, entry in enumerate(further):
        name, argument = _entry(f"controllers[{number}]", entry)
        if name != NO_CONTROLLER:
            yield name, argument
        elif argument:
            raise InvalidRequest(
                "controller_arg is given without a controller; set controller", f"controllers[{number}]"
            )


def _entry(where: str, entry: Any) -> tuple[str, Any]:
    """Return the name and the argument of one entry in a list of controllers."""
    fields = {"controller": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, Mapping) or not isinstance(fields.get("controller"), str):
        raise InvalidRequest(
            f"{where} is {short_repr(entry)}; must be a name, or an object with controller and controller_arg", where
        )
    unknown = next((name for name in fields if name not in ("controller", "controller_arg")), None)
    if unknown is not None:
        raise InvalidRequest(
            f"{where} has an unknown field {short_repr(unknown)}; its fields are controller and controller_arg", where
        )
    argument = fields.get("controller_arg")
    return fields["controller"], "" if argument is None else argument


def wasm_controller(model: LoadedModel, name: str, argument: Any, identity: Identity) -> WasmController:
    """Return the controller for a module id, a tag or a `gh:` name. An argument that is a string is passed unchanged.
    Any other argument is passed as JSON text."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(
            f"the name in controller has {len(name)} characters; must have 1 to {MAX_NAME_CHARS}", "controller"
        )
    control_of(model)
    from bridle.aici.client import WasmController

    text = argument if isinstance(argument, str) else msgspec.json.encode(argument).decode()
    return WasmController(name, text, auth_of(identity))


def control_of(model: LoadedModel) -> RuntimePool:
    """Return the control runtime of a model. Raises `UnsupportedFeature` if the model has no control runtime."""
    if model.control is None:
        raise UnsupportedFeature(
            f"controller: the model {model.name!r} is served without a control runtime, so it runs no controllers",
            "controller",
        )
    return model.control


def auth_of(identity: Identity) -> Auth:
    """Return the identity of a client in the form that the runtime uses."""
    return Auth(identity.user, identity.is_admin)
