"""Flags for a constraint on the output, or for controllers that steer it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.serving.controller_runtime import ControlSettings
    from bridle.serving.models.loading import LoadedModel
    from bridle.serving.requests.steering import Controllers, Steering
    from bridle.structured_output.spec import Constraint

_STEERING = Group("Steering", sort_key=12)
_MAX_BYTES = 1 << 20

Ctrl = Annotated[tuple[str, ...], Parameter(name=["--ctrl", "-c"], negative="")]


@Parameter(name="*", group=_STEERING)
@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """Options for a constraint on the output; at most one may be given."""

    regex: str | None = None
    "Regular expression that the whole output matches."
    schema: Annotated[Path | None, Parameter(name=["--schema", "--json-schema"])] = None
    "File with a JSON schema that the output matches."
    choice: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Text that the output may be. If repeated, the output is one of the texts."
    grammar: Path | None = None
    "File with a Lark or GBNF grammar that the output matches."

    def named(self) -> dict[str, Any]:
        """Return the validated constraint as a request field, by its name; empty without a constraint."""
        given: dict[str, Any] = {"regex": self.regex, "choice": list(self.choice) or None}
        if self.schema is not None:
            given["json_schema"] = _json(self.schema)
        if self.grammar is not None:
            given["grammar"] = _text(self.grammar, "grammar")
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            from bridle.structured_output.request_fields import constraint_named

            try:
                form = constraint_named(given)  # raises if the constraint is invalid
            except InvalidRequest as error:
                raise _about(self.grammar or self.schema, error) from None
            self._check_file(form)
        return given

    def _check_file(self, form: Constraint | None) -> None:
        """Raise `InvalidRequest` for an invalid file, before a model is loaded or a server is called."""
        file = self.grammar or self.schema
        if form is None or file is None:
            return
        problem = _problem(form)
        if problem is not None:
            raise _about(file, problem)

    def plain(self) -> dict[str, Any] | None:
        """Return the value for a request's field `constraint`; None without a constraint."""
        form = self.constraint()
        return None if form is None else form.to_dict()

    def constraint(self) -> Constraint | None:
        """Return the validated constraint; None if no flag sets one."""
        named = self.named()
        if not named:
            return None
        from bridle.structured_output.request_fields import constraint_named

        return constraint_named(named)


@Parameter(name="*", group=_STEERING)
@dataclass(frozen=True, kw_only=True)
class SteeringOptions(ConstraintOptions):
    """Options for a constraint on the output and for controllers."""

    ctrl: Ctrl = ()
    "Controller that steers the output: name of a standard controller, module id, tag or `gh:` reference. Repeatable."
    ctrl_arg: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Argument of a controller: the first is for the first `--ctrl`, and so on. `@FILE` reads it from a file.
    Repeatable."""

    def named(self) -> dict[str, Any]:
        """Return the constraint as a request's field. Raises `InvalidRequest` if there are more arguments than
        controllers."""
        if len(self.ctrl_arg) > len(self.ctrl):
            message = f"--ctrl-arg was given {len(self.ctrl_arg)} times, --ctrl {len(self.ctrl)}; each needs its own"
            raise InvalidRequest(message, "ctrl_arg")
        return super().named()

    def controllers(self) -> list[dict[str, Any]]:
        """Return the controllers with their arguments, in the format of a request."""
        self.named()
        return [
            {"controller": name} | ({"controller_arg": _argument(argument)} if argument is not None else {})
            for name, argument in zip_longest(self.ctrl, self.ctrl_arg)
        ]

    def fields(self) -> dict[str, Any]:
        """Return the request fields for the constraint and the controllers; empty without both."""
        given = {"constraint": self.plain(), "controllers": self.controllers() or None}
        return {name: value for name, value in given.items() if value is not None}

    def control(self) -> ControlSettings | None:
        """Return the settings of the control runtime, or None without a controller."""
        if not self.ctrl:
            return None
        from bridle.serving.controller_runtime import as_control

        return as_control(True)

    def steering(self, model: LoadedModel) -> Steering:
        """Return the constraint and controllers for a request to a model in this process."""
        from bridle.serving.lifecycle.in_process import InProcessServing

        return InProcessServing(model).steering(self.by_name(), self.constraint())

    def by_name(self) -> Controllers:
        """Return the controllers in the format of a request."""
        from bridle.serving.requests.steering import Controllers

        return Controllers(controllers=self.controllers())


@lru_cache(maxsize=4)
def _problem(form: Constraint) -> InvalidRequest | None:
    """Return the error of an invalid constraint; None if the constraint is valid."""
    from bridle.structured_output.validation import check_usable

    try:
        check_usable(form)
    except InvalidRequest as error:
        return error
    return None


def _about(file: Path | None, error: InvalidRequest) -> InvalidRequest:
    """Return the error with the file's name in front, if the constraint came from a file."""
    return error if file is None else InvalidRequest(f"{file}: {error}", error.param)


def _argument(text: str) -> str:
    return _text(Path(text[1:]), "ctrl_arg") if text.startswith("@") else text


def _json(path: Path) -> Any:
    text = _text(path, "schema")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {str(error)[:200]}", "schema") from None


def _text(path: Path, param: str) -> str:
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise InvalidRequest(f"{path} has {size} bytes; at most {_MAX_BYTES}", param)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not a text file in UTF-8", param) from None
