"""Shows values in messages: the result is short, and cheap to compute for values of any size.

A client may send a list of a million numbers in place of a name. The error shows only the beginning of the list,
because writing all of it would take longer than handling the request. Clients also must not learn paths on the server's
machine. Messages of libraries and of the operating system often name files. So only the last part of each path in a
message is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from reprlib import Repr
from typing import Any

from bridle.errors import (
    AdapterRefused,
    BridleError,
    ControllerError,
    ControllerUnavailable,
    InvalidRequest,
    Unauthorized,
)

MAX_SHOWN_CHARS = 80
#: A path in quotes may contain spaces. The address of a socket counts as a path; a URL does not.
_QUOTED = re.compile(r"""(?<=['"])(?:unix:)?/(?:[^'"/\n]+/)+(?=[^'"/\n]+['"])""")
_PLAIN = re.compile(r"""(?:\bunix:(?://)?/?|(?<![\w/:.])/)(?:[^\s'"`/,;()<>]+/)+""")


class _Short(Repr):
    """A `repr` that shows only the beginning of long values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 16
        self.maxlevel = 4
        self.maxlong = self.maxother = MAX_SHOWN_CHARS

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: MAX_SHOWN_CHARS + 1])

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: MAX_SHOWN_CHARS + 1])

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        """Show the first entries of a mapping, in the order of the mapping. The base class would sort all keys."""
        if level <= 0 and x:
            return "{...}"
        pairs = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join(pairs + ["..."] * (len(x) > self.maxdict)) + "}"


_short = _Short()


def short_repr(value: object) -> str:
    """Return the `repr` of a value, cut after about eighty characters."""
    text = _short.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def public_text(error: BridleError) -> str:
    """Return an error's message for a client. A message about the request is unchanged. In all other messages, the
    folders of the server are removed."""
    text = str(error)
    return text if _is_about_the_request(error) else without_folders(text)


def without_folders(text: str) -> str:
    """Return the text with each path reduced to its last part."""
    return _PLAIN.sub("", _QUOTED.sub("", text))


def _is_about_the_request(error: BridleError) -> bool:
    if isinstance(error, (AdapterRefused, ControllerUnavailable)):
        return False
    return isinstance(error, (InvalidRequest, ControllerError, Unauthorized))
