"""Controllers and constraints on any route: from the fields of a body to what steers the engine request, and how
rewinds are told.

The optional packages of the control runtime are touched only when a model has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request

from bridle.aici.protocol import Auth
from bridle.constraints import Constraint
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.openai.constraint import constraint_of
from bridle.http.transport.identity import identity_of
from bridle.service import LoadedModel, RewindPolicy

if TYPE_CHECKING:
    from bridle.aici.client import RuntimePool, WasmController
    from bridle.controllers.free_part import FreePart
    from bridle.http.openai.schemas import SamplingFields

#: The controller that does nothing: plain generation.
NO_CONTROLLER = "none"
MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class Steering:
    """What steers the request behind a body: a controller, a constraint, or nothing."""

    controller: WasmController | FreePart | None = None
    constraint: Constraint | None = None
    rewind: RewindPolicy = RewindPolicy.HOLD


def control_of(model: LoadedModel) -> RuntimePool:
    """The control runtime of a model; raises `UnsupportedFeature` if it has none."""
    if model.control is None:
        raise UnsupportedFeature(f"{model.name!r} is served without a control runtime", "controller")
    return model.control


def auth_of(request: Request) -> Auth:
    """Who asks, in the runtime's words."""
    identity = identity_of(request)
    return Auth(identity.user, identity.is_admin)


def wasm_controller(request: Request, model: LoadedModel, name: str, argument: Any) -> WasmController:
    """A controller by module id, tag or `gh:` name. Its argument is a string as it is, anything else as JSON text."""
    control_of(model)
    from bridle.aici.client import WasmController

    text = argument if isinstance(argument, str) else msgspec.json.encode(argument).decode()
    return WasmController(name, text, auth_of(request))


def steering_of(body: SamplingFields, request: Request, model: LoadedModel) -> Steering:
    """The controller or the constraint of an OpenAI body. Raises `InvalidRequest` for what does not go together with
    one."""
    name, constraint = body.controller, constraint_of(body)
    if name is None or name == NO_CONTROLLER:
        if body.controller_arg is not None:
            raise InvalidRequest("controller_arg needs a controller", "controller_arg")
        return Steering(constraint=constraint)
    if constraint is not None:
        raise InvalidRequest("a controller and a constraint were given; a request has one of them", "controller")
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"controller has {len(name)} characters; must be 1 to {MAX_NAME_CHARS}", "controller")
    argument = "" if body.controller_arg is None else body.controller_arg
    controller = wasm_controller(request, model, name, argument)
    return Steering(controller, rewind=RewindPolicy(body.rewind or "hold"))
