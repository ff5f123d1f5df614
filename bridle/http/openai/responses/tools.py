"""Converts tools of the Responses API to functions that a model may call. A tool in a namespace gets the namespace as a
prefix of its name. Tools that OpenAI's server runs itself are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.openai.schemas import MAX_TOOLS, JsonObjects
from bridle.safe_repr import short_repr

#: Tools that OpenAI runs itself or trains its models for. Clients offer them to every server, and a server may ignore
#: them.
_BUILT_IN = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search"),
        *("image_generation", "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_preview"),
    }
)
_DATED = ("web_search_2", "web_search_preview_2")
_FIELDS = ("name", "description", "parameters", "strict")


class Name(NamedTuple):
    """The name of a function, and the name of its namespace."""

    name: str
    namespace: str


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. `functions` are in the format of the chat API; `told` are the tools that the response
    lists. `names` maps the flat names of functions in namespaces; `skipped` has the types of ignored tools."""

    functions: JsonObjects | None = None
    told: JsonObjects = field(default_factory=list)
    names: Mapping[str, Name] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def flat_name(name: Any, namespace: Any) -> Any:
    """Return the name of a function as the model sees it: with its namespace as a prefix."""
    if not isinstance(name, str) or not isinstance(namespace, str) or not namespace:
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


def read_tools(tools: JsonObjects | None) -> Tools:
    """Read the tools of a request. Raises `InvalidRequest` or `UnsupportedFeature` that names the invalid tool."""
    if tools is None:
        return Tools()
    told: JsonObjects = []
    functions: JsonObjects = []
    names: dict[str, Name] = {}
    skipped: dict[str, None] = {}
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and (kind in _BUILT_IN or kind.startswith(_DATED)):
            skipped[kind] = None
            continue
        told.append(_told(tool) if kind == "function" else tool)
        functions += (
            _namespaced(tool, f"tools[{i}]", names) if kind == "namespace" else [_function(tool, f"tools[{i}]")]
        )
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(functions)} functions; at most {MAX_TOOLS}", "tools")
    return Tools(functions, told, names, tuple(skipped))


def read_choice(choice: Any) -> Any:
    """Convert a tool choice: functions get the names that the model sees."""
    if not isinstance(choice, Mapping):
        return choice
    if isinstance(tools := choice.get("tools"), list):
        return {**choice, "tools": [_chosen(tool) for tool in tools]}
    return _chosen(choice)


def _chosen(choice: Any) -> Any:
    if not isinstance(choice, Mapping) or "namespace" not in choice:
        return choice
    return {**choice, "name": flat_name(choice.get("name"), choice["namespace"])}


def _namespaced(tool: Mapping[str, Any], where: str, names: dict[str, Name]) -> Iterable[dict[str, Any]]:
    namespace, inner = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise InvalidRequest(f"{where}.name is {short_repr(namespace)}; must be the name of a namespace", "tools")
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise InvalidRequest(f"{where}.tools must be a list of functions", "tools")
    for j, each in enumerate(inner[: MAX_TOOLS + 1]):
        flat = flat_name(each.get("name"), namespace)
        if isinstance(flat, str):
            names[flat] = Name(each["name"], namespace)
        yield _function({**each, "name": flat}, f"{where}.tools[{j}]")


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedFeature(
            f"{where} is of type {short_repr(tool.get('type'))}; only tools of type function are supported", "tools"
        )
    return {"type": "function", "function": {name: tool[name] for name in _FIELDS if tool.get(name) is not None}}


def _told(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with every field that clients require in a response."""
    return {"type": "function", "name": None, "description": None, "parameters": None, "strict": None} | dict(tool)
