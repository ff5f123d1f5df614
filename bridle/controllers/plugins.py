"""Classes of controllers that an operator offers: named by a flag of the server, chosen by requests as `class:NAME`.

A request names a class and may give it an argument. Only the operator chooses the code. The code is trusted and runs on
the engine's thread, like plain Python controllers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from bridle.controller_tools.module_loader import load_module
from bridle.controllers.python import Controller
from bridle.errors import ControllerError, InvalidRequest
from bridle.safe_repr import short_repr

#: Prefix of the names of these controllers in requests.
PREFIX = "class:"
_PARAM = "controller_class"


def load_classes(specs: Iterable[str]) -> Mapping[str, type[Controller]]:
    """Return the classes of `[NAME=]MODULE:CLASS` by their names; MODULE is a module's name or a Python file. Raises
    `InvalidRequest` if a class cannot be loaded or is not a controller."""
    found: dict[str, type[Controller]] = {}
    for spec in specs:
        name, equals, place = spec.rpartition("=")
        module, colon, attribute = place.rpartition(":")
        if not colon or not module or not attribute or (equals and not name):
            raise InvalidRequest(f"controller_class is {short_repr(spec)}; must be [NAME=]MODULE:CLASS", _PARAM)
        kind = getattr(load_module(module, _PARAM), attribute, None)
        if not isinstance(kind, type) or not issubclass(kind, Controller):
            raise InvalidRequest(f"controller_class {short_repr(place)} is not a subclass of bridle.Controller", _PARAM)
        if (name or attribute) in found:
            raise InvalidRequest(f"controller_class names {short_repr(name or attribute)} twice", _PARAM)
        found[name or attribute] = kind
    return found


def make_demanded(place: str, argument: Any) -> Controller:
    """Create the controller of an operator's class MODULE:CLASS, which another process can create again. Raises
    `InvalidRequest` or `ControllerError`."""
    controller = make_controller(_class_at(place), f"{PREFIX}policy", argument)
    object.__setattr__(controller, "made_from", (place, argument))  # set also if the class forbids new attributes
    return controller


@lru_cache(256)
def _class_at(place: str) -> Mapping[str, type[Controller]]:
    return load_classes([f"policy={place}"])


def is_class(name: str | None) -> bool:
    """Return whether the name refers to a class of the operator."""
    return name is not None and name.startswith(PREFIX)


def make_controller(classes: Mapping[str, type[Controller]], name: str, argument: Any) -> Controller:
    """Return the controller that a request names, made with the request's argument if there is one. Raises
    `InvalidRequest` for a name that the operator does not offer, and `ControllerError` if the class fails."""
    kind = classes.get(name.removeprefix(PREFIX))
    if kind is None:
        offered = ", ".join(PREFIX + each for each in classes) or "none"
        raise InvalidRequest(
            f"controller is {short_repr(name)}; the controller classes of this server are: {offered}", "controller"
        )
    make: Callable[..., Controller] = kind
    try:
        made = make() if argument is None or argument == "" else make(argument)
    except Exception as error:
        raise ControllerError(f"controller {name} could not be created: {type(error).__name__}: {error}") from error
    made.asked_as = name
    return made
