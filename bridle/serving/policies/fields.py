"""The settings of one policy. Each setting is checked when it is read. An error names the file, the policy, the key and
the value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr

T = TypeVar("T")
_KIND_NAMES = {str: "a text", int: "an integer", bool: "true or false", dict: "a table", float: "a number"}
#: Maximum number of entries of a list of texts, and of characters of each.
MAX_ENTRIES, MAX_ENTRY_CHARS = 10_000, 1_000


class PolicyFields:
    """The settings of a policy that have not been read yet."""

    def __init__(self, where: str, name: str, values: Mapping[str, Any]) -> None:
        self._where, self._values = where, dict(values)
        self.name = name

    def error(self, key: str, what: str) -> InvalidRequest:
        """Return the error about one setting."""
        return InvalidRequest(f"{self._where}: policy {self.name!r}: {key} {what}", "policies")

    def wrong(self, key: str, value: object, wanted: str) -> InvalidRequest:
        """Return the error about the value of one setting."""
        return self.error(key, f"is {short_repr(value)}; must be {wanted}")

    def pop(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Remove a setting of the given type from the settings and return it; return `default` if it is not set."""
        value = self._values.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(key, value, _KIND_NAMES.get(kind, kind.__name__))
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """Return a required setting."""
        value = self.pop(key, kind)
        if value is None:
            raise self.error(key, f"is missing; must be {_KIND_NAMES.get(kind, kind.__name__)}")
        return value

    def text(self, key: str, default: str = "", most: int = MAX_ENTRY_CHARS) -> str:
        """Return a setting that is a text of at most `most` characters."""
        value = self.pop(key, str, default) or ""
        if len(value) > most:
            raise self.wrong(key, value, f"at most {most} characters")
        return value

    def flag(self, key: str) -> bool:
        """Return a setting that is a boolean; False by default."""
        return bool(self.pop(key, bool, False))

    def count(self, key: str, default: int | None, least: int = 1, most: int = 1 << 31) -> int | None:
        """Return a setting that is an integer within the limits."""
        value = self.pop(key, int, default)
        if value is not None and not least <= value <= most:
            raise self.wrong(key, value, f"between {least} and {most}")
        return value

    def choice(self, key: str, known: Iterable[str], default: str) -> str:
        """Return a setting that must be one of the words in `known`."""
        value = self.pop(key, str, default) or default
        if value not in known:
            raise self.wrong(key, value, f"one of {', '.join(known)}")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return a setting that is a list of texts, none of them empty."""
        values = self._values.pop(key, None)
        if values is None and default is not None:
            return default
        if not isinstance(values, list) or not values:
            raise (
                self.error(key, "is missing; must be a list of texts")
                if values is None
                else self.wrong(key, values, "a list of texts that is not empty")
            )
        if len(values) > MAX_ENTRIES:
            raise self.error(key, f"has {len(values)} entries; must have at most {MAX_ENTRIES}")
        for value in values:
            if not isinstance(value, str) or not 0 < len(value) <= MAX_ENTRY_CHARS:
                raise self.wrong(key, value, f"a list of texts of 1 to {MAX_ENTRY_CHARS} characters")
        return tuple(values)

    def anything(self, key: str) -> Any:
        """Return a setting of any type; None if it is not set."""
        return self._values.pop(key, None)

    def end(self, kind: str) -> None:
        """Raise an error for the first setting that was not read, because it is unknown."""
        for key in self._values:
            raise self.error(key, f"is not a setting of a policy of kind {kind!r}")
