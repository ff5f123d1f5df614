"""Constraints on the OpenAI routes: those that the fields of a body name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.constraints import Constraint
from bridle.constraints.named import NAMES, constraint_named

if TYPE_CHECKING:
    from bridle.http.openai.schemas import SamplingFields


def constraint_of(body: SamplingFields) -> Constraint | None:
    """The constraint in a body; None if there is none. Raises `InvalidRequest` that names the field."""
    return constraint_named({name: getattr(body, name) for name in NAMES})
