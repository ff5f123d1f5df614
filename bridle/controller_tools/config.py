"""An operator's file of tools (TOML): the tools, the users of each, and their limits.

    [tools.weather]
    python = "weather.py:now"

    [tools.wiki]
    http = ["GET https://en.wikipedia.org/api/rest_v1/"]

    [tools.time]
    mcp = ["mcp-server-time"]
    users = ["ann"]

Any mistake in the file is reported at the start, with the name of the table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from bridle.controller_tools.access import ROLES, ToolPermission
from bridle.controller_tools.client import ClientTool
from bridle.controller_tools.executor import LogLevel, Tool, ToolExecutor
from bridle.controller_tools.functions import FunctionTool, Threads
from bridle.controller_tools.http import HttpRule, HttpTool
from bridle.controller_tools.limits import ToolLimits
from bridle.controller_tools.mcp import McpServer, McpTool, check_installed
from bridle.controller_tools.module_loader import load_module
from bridle.errors import BridleError, InvalidRequest
from bridle.safe_http import HttpLimits, networks_of
from bridle.safe_repr import short_repr

_TOP = ("tools", "limits", "log")
_MAX_FILE_BYTES = 1 << 20

Table = Mapping[str, Any]
Maker = Callable[[str, Table, ToolLimits, Threads], Tool]


def read_tools(path: Path) -> ToolExecutor:
    """Return the tools of a file. Raises `InvalidRequest`, and `UnsupportedFeature` if a needed package is missing."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidRequest(f"tools: {path.name} has more than {_MAX_FILE_BYTES} bytes", "tools")
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise InvalidRequest(f"tools: {path} cannot be read: {error.strerror}", "tools") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"tools: {path.name} is not valid TOML: {error}", "tools") from None
    return make_desk(content, path.parent)


def make_desk(content: Table, folder: Path = Path()) -> ToolExecutor:
    """Return the tools of a file's content. Python files that it names are searched in `folder`."""
    _check_fields("tools", content, _TOP)
    limits = _limits(_table("limits", content.get("limits", {})))
    log = content.get("log", "none")
    if log not in get_args(LogLevel):
        raise InvalidRequest(
            f"tools: log is {short_repr(log)}; must be one of {', '.join(get_args(LogLevel))}", "tools"
        )
    threads = Threads(limits.max_threads)
    tools: dict[str, Tool] = {}
    grants: dict[str, ToolPermission] = {}
    direct: set[str] = set()
    for name, table in _table("tools", content.get("tools", {})).items():
        where = f"tools.{name}"
        try:
            tools[name] = _tool(where, name, _table(where, table), limits, threads, folder)
            grants[name] = _grant(where, table)
            direct |= {name} if _is_direct(where, table) else set()
        except InvalidRequest as error:
            text = str(error)
            raise type(error)(text if text.startswith(where) else f"{where}: {text}", "tools") from None
    return ToolExecutor(tools, limits, grants, log, direct)


def _tool(where: str, name: str, table: Table, limits: ToolLimits, threads: Threads, folder: Path) -> Tool:
    kinds = [kind for kind in _KINDS if kind in table]
    if len(kinds) != 1:
        raise InvalidRequest(f"{where} must have one of {', '.join(_KINDS)}; it has {' and '.join(kinds) or 'none'}")
    make, known = _KINDS[kinds[0]]
    _check_fields(where, table, (kinds[0], *known, "users", "roles", "direct"))
    return make(name, {**table, "folder": folder}, limits, threads)


def _grant(where: str, table: Table) -> ToolPermission:
    users, roles = _texts(where, table, "users"), _texts(where, table, "roles")
    wrong = next((role for role in roles if role not in ROLES), None)
    if wrong is not None:
        raise InvalidRequest(f"{where}: roles has {short_repr(wrong)}; each role must be one of {', '.join(ROLES)}")
    if not users and "users" in table:
        raise InvalidRequest(f"{where}: users is empty, so the tool cannot be used; list users, or remove the tool")
    return ToolPermission(frozenset(users), frozenset(roles))


def _is_direct(where: str, table: Table) -> bool:
    """Return whether users may call the tool themselves."""
    direct = table.get("direct", False)
    if not isinstance(direct, bool):
        raise InvalidRequest(f"{where}: direct is {short_repr(direct)}; must be true or false")
    if direct and "client" in table:
        raise InvalidRequest(f"{where}: direct is true, but the client answers this tool; remove direct")
    return direct


# -- kinds -------------------------------------------------------------------------------------------------


def _function(name: str, table: Table, limits: ToolLimits, threads: Threads) -> Tool:
    place = _text("python", table["python"])
    module, colon, attribute = place.rpartition(":")
    if not colon or not module or not attribute:
        raise InvalidRequest(f"python is {short_repr(place)}; must be MODULE:FUNCTION")
    if module.endswith(".py"):
        module = str(table["folder"] / module)
    function = getattr(load_module(module, "python"), attribute, None)
    if function is None:
        raise InvalidRequest(f"python is {short_repr(place)}; the module has no {short_repr(attribute)}")
    return FunctionTool(function, name, threads)


def _http(name: str, table: Table, limits: ToolLimits, threads: Threads) -> Tool:
    rules = tuple(HttpRule.of(text) for text in _texts("http", table, "http"))
    if not rules:
        raise InvalidRequest("http is empty; it must list the allowed requests, such as 'GET https://example.org/api/'")
    bounds = HttpLimits(
        max_bytes=_number("max_bytes", table.get("max_bytes", HttpLimits().max_bytes), int),
        timeout=_number("timeout", table.get("timeout", HttpLimits().timeout), float),
        private=networks_of(_texts("private", table, "private")),
        headers=_strings("headers", table.get("headers", {})),
    )
    return HttpTool(rules, bounds, threads, name)


def _mcp(name: str, table: Table, limits: ToolLimits, threads: Threads) -> Tool:
    check_installed()
    given = table["mcp"]
    offered = frozenset(_texts("only", table, "only")) if "only" in table else None
    if isinstance(given, str):
        if not given.startswith(("http://", "https://")):
            raise InvalidRequest(f"mcp is {short_repr(given)}; must be a URL, or a command as a list")
        if "env" in table:
            raise InvalidRequest("env is only for an MCP server that a command starts")
        headers = _strings("headers", table.get("headers", {}))
        return McpTool(name, McpServer(url=given, headers=headers, tools=offered, max_bytes=limits.max_result_bytes))
    if "headers" in table:
        raise InvalidRequest("headers are only for an MCP server with a URL")
    command = tuple(_texts("mcp", table, "mcp"))
    env = _strings("env", table.get("env", {}))
    return McpTool(name, McpServer(command, env, tools=offered, max_bytes=limits.max_result_bytes))


def _client(name: str, table: Table, limits: ToolLimits, threads: Threads) -> Tool:
    return ClientTool(_text("client", table["client"]))


_KINDS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "python": (_function, ()),
    "http": (_http, ("max_bytes", "timeout", "private", "headers")),
    "mcp": (_mcp, ("env", "headers", "only")),
    "client": (_client, ()),
}


# -- values ------------------------------------------------------------------------------------------------


def _limits(table: Table) -> ToolLimits:
    _check_fields("limits", table, [field.name for field in fields(ToolLimits)])
    try:
        return ToolLimits(**table)
    except BridleError as error:
        raise InvalidRequest(f"tools: limits: {error}", "tools") from None


def _check_fields(where: str, table: Table, known: Any) -> None:
    unknown = next((name for name in table if name not in known), None)
    if unknown is not None:
        raise InvalidRequest(f"{where} has a field {short_repr(unknown)}; known are {', '.join(known)}", "tools")


def _table(where: str, value: Any) -> Table:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} is {short_repr(value)}; must be a table", "tools")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} is {short_repr(value)}; must be a text")
    return value


def _texts(where: str, table: Table, name: str) -> list[str]:
    value = table.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest(f"{name} is {short_repr(value)}; must be a list of texts")
    return value


def _strings(where: str, value: Any) -> Mapping[str, str]:
    table = _table(where, value)
    if not all(isinstance(each, str) and each.isprintable() for each in table.values()):
        raise InvalidRequest(f"{where} is {short_repr(value)}; its values must be texts")
    return table


def _number(where: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1 << 30 or (kind is int and not isinstance(value, int)):
        raise InvalidRequest(
            f"{where} is {short_repr(value)}; must be a {'whole ' if kind is int else ''}number above 0"
        )
    return value
