"""Controllers and constraints on any route: converts the fields of a body to the controller of the engine request, and
says how rewinds are reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from bridle.constraints import Constraint
from bridle.http.openai.constraint import constraint_of
from bridle.http.transport.identity import identity_of
from bridle.service import LoadedModel, RewindPolicy
from bridle.service.steering import controller_of

if TYPE_CHECKING:
    from bridle.aici.client import WasmController
    from bridle.controllers.free_part import FreePart
    from bridle.http.openai.schemas import SamplingFields


@dataclass(frozen=True, slots=True)
class Steering:
    """What steers the request of a body: a controller, a constraint, or nothing."""

    controller: WasmController | FreePart | None = None
    constraint: Constraint | None = None
    rewind: RewindPolicy = RewindPolicy.HOLD


def steering_of(body: SamplingFields, request: Request, model: LoadedModel) -> Steering:
    """The controller or the constraint of an OpenAI body. Raises `InvalidRequest` for fields that do not go together
    with one."""
    constraint, identity = constraint_of(body), identity_of(request)
    controller = controller_of(model, body.controller, body.controller_arg, identity, constraint is not None)
    if controller is None:
        return Steering(constraint=constraint)
    return Steering(controller, rewind=RewindPolicy(body.rewind or "hold"))
