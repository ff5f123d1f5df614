"""What steers a request, by the same rules for every API: the controller's name, its argument, and what may go with it.

This module knows no wire format: a front-end hands in what its fields say. The optional packages of the control runtime
are imported only when a model has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from bridle.aici.protocol import Auth
from bridle.constraints.spec import Constraint, parse
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.service.keys import Identity
from bridle.service.loading import LoadedModel
from bridle.service.rewind import RewindPolicy

if TYPE_CHECKING:
    from bridle.aici.client import RuntimePool, WasmController

#: The controller that does nothing: plain generation.
NO_CONTROLLER = "none"
MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class Steering:
    """What steers a request: a controller, a constraint, or nothing. `rewind` is how text is told that a controller may
    take back."""

    controller: object | None = None
    constraint: Constraint | None = None
    rewind: RewindPolicy = RewindPolicy.HOLD


PLAIN = Steering()


def is_controlled(name: str | None) -> bool:
    """Whether `name` is that of a controller that does something."""
    return name is not None and name != NO_CONTROLLER


def ignores_eos(name: str | None, given: bool | None) -> bool:
    """Whether the end-of-text token does not end the output. That is what the client has `given`; without its word, it
    is so under a controller, which decides by itself when its output is over."""
    return is_controlled(name) if given is None else given


def steering_of(
    name: str | None,
    argument: Any,
    constraint: Constraint | Mapping[str, Any] | None,
    model: LoadedModel,
    identity: Identity,
    rewind: str | None = None,
) -> Steering:
    """What a request asks to be steered by, on behalf of who asks. Raises `InvalidRequest` for what does not go
    together, and `UnsupportedFeature` if the model has no control runtime."""
    form = None if constraint is None else parse(constraint)
    if name is None or not is_controlled(name):
        if argument is not None:
            raise InvalidRequest("controller_arg needs a controller", "controller_arg")
        return PLAIN if form is None else Steering(constraint=form)
    if form is not None:
        raise InvalidRequest("a controller and a constraint were given; a request has one of them", "controller")
    controller = wasm_controller(model, name, "" if argument is None else argument, identity)
    return Steering(controller, rewind=RewindPolicy(rewind or "hold"))


def wasm_controller(model: LoadedModel, name: str, argument: Any, identity: Identity) -> WasmController:
    """The controller of a module id, tag or `gh:` name. An argument that is a string is passed as it is, any other as
    JSON text."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"controller has {len(name)} characters; must be 1 to {MAX_NAME_CHARS}", "controller")
    control_of(model)
    from bridle.aici.client import WasmController

    text = argument if isinstance(argument, str) else msgspec.json.encode(argument).decode()
    return WasmController(name, text, auth_of(identity))


def control_of(model: LoadedModel) -> RuntimePool:
    """The control runtime of a model. Raises `UnsupportedFeature` if it has none."""
    if model.control is None:
        raise UnsupportedFeature(f"{model.name!r} is served without a control runtime", "controller")
    return model.control


def auth_of(identity: Identity) -> Auth:
    """The identity of a client in the runtime's terms."""
    return Auth(identity.user, identity.is_admin)
