"""Tools and tool choice of a request, in OpenAI's format. All routes convert their requests to this format. A tool
choice may have the format of chats, with the fields `function` and `allowed_tools`, or the format of responses, without
these fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bridle.chat.tool_parsers.grammar import Function
from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr

MAX_NAME_CHARS = 256
#: The maximum number of calls in one output that consists only of calls.
MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The model may call `functions`. With `is_required`, it must call at least one, and at most `max_calls` times."""

    functions: tuple[Function, ...] = ()
    is_required: bool = False
    max_calls: int = MAX_CALLS

    @property
    def is_strict(self) -> bool:
        return any(function.is_strict for function in self.functions)

    def loosened(self) -> ToolChoice:
        """Return the choice without the schemas of functions that are not strict."""
        loose = (each if each.is_strict else replace(each, parameters=None) for each in self.functions)
        return replace(self, functions=tuple(loose))


def offer_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolChoice:
    """Validate tools and tool choice, and return the choice. Raises `InvalidRequest` that names the invalid tool or
    choice."""
    functions = [_function(tool, f"tools[{position}]") for position, tool in enumerate(tools or ())]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"tools has function {name!r} {names.count(name)} times; names must differ", "tools")
    if isinstance(choice, str) and choice in names:  # text-generation-inference accepts a plain name
        choice = {"type": "function", "function": {"name": choice}}
    max_calls = 1 if parallel is False else MAX_CALLS
    mode, allowed = _choice(choice)
    if mode in ("none", "auto") and not functions:
        return ToolChoice()
    if not functions:
        raise InvalidRequest(f"tool_choice is {short_repr(choice)}, but there are no tools", "tool_choice")
    for name in allowed or ():
        if name not in names:
            raise InvalidRequest(f"tool_choice names {short_repr(name)}, which is not among the tools", "tool_choice")
    if mode == "none":
        return ToolChoice()
    kept = tuple(each for each in functions if allowed is None or each.name in allowed)
    is_single = isinstance(choice, Mapping) and choice.get("type") == "function"
    return ToolChoice(kept, mode == "required", 1 if is_single else max_calls)


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools for a chat template, without `strict`, which is for the server and not for the model. So the prompt
    and its cached prefix do not depend on `strict`."""
    return [_without_strict(tool) for tool in tools]


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or "strict" not in function:
        return dict(tool)
    return {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}


def _function(tool: Mapping[str, Any], where: str) -> Function:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidRequest(f"{where} must have the type 'function' and a function object", "tools")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name must be a non-empty string", "tools")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{where}.function.name has {len(name)} characters; at most {MAX_NAME_CHARS}", "tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{where}.function.parameters must be an object: a JSON schema", "tools")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.function.strict is {short_repr(strict)}; must be true or false", "tools")
    return Function(name, parameters, bool(strict))


def _choice(choice: str | Mapping[str, Any] | None) -> tuple[Literal["none", "auto", "required"], list[str] | None]:
    """Return the mode, and the names of the functions that may be called (None: all)."""
    if choice is None or choice == "auto":
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        return "required", None
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            return "required", [_name_in(choice)]
        allowed = choice.get("allowed_tools", choice)
        if choice.get("type") == "allowed_tools" and isinstance(allowed, Mapping):
            return _allowed(allowed)
    raise InvalidRequest(
        f"tool_choice is {short_repr(choice)}; must be 'none', 'auto', 'required', or name a function", "tool_choice"
    )


def _allowed(allowed: Mapping[str, Any]) -> tuple[Literal["none", "auto", "required"], list[str] | None]:
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequest(
            "tool_choice.allowed_tools needs a mode, auto or required, and a tools list", "tool_choice"
        )
    return mode, [_name_in(tool) for tool in tools]


def _name_in(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            f"tool_choice is {short_repr(choice)}; function.name must be a function's name", "tool_choice"
        )
    return name
