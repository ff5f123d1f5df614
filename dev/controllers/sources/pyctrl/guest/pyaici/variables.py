"""Variables that all forks of a request share, and checks of them for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from wit_world.imports import host


def get_var(name: str) -> bytes | None:
    """The value of a variable, None if nobody has set it."""
    found = _command("ReadVar", name=name).get("ReadVar")
    return None if found is None else bytes.fromhex(found["value"])


def set_var(name: str, value: str | bytes) -> None:
    """Write a variable."""
    _write(name, value, "Set")


def append_var(name: str, value: str | bytes) -> None:
    """Append to a variable; one that is not set counts as empty."""
    _write(name, value, "Append")


def check_var(name: str, value: str) -> None:
    """Raise `AssertionError` if the variable does not hold this text."""
    found = get_var(name)
    if found is None:
        raise AssertionError(f"variable {name!r} is not set; expected {value!r}")
    text = found.decode(errors="replace")
    if text != value:
        raise AssertionError(f"variable {name!r} is {text!r}; expected {value!r}")


def check_vars(values: Mapping[str, str]) -> None:
    """`check_var` for each of them."""
    for name, value in values.items():
        check_var(name, value)


def _write(name: str, value: str | bytes, op: str) -> None:
    data = value.encode() if isinstance(value, str) else bytes(value)
    _command("WriteVar", name=name, value=data.hex(), op=op, when_version_is=None)


def _command(kind: str, **fields: object) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(host.storage(json.dumps({kind: fields})))
    return reply
