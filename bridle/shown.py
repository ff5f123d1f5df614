"""Values in messages: short, and cheap whatever they hold.

A client may send a list of a million numbers where a name belongs. The error shows how it begins; writing out the rest
of it would take longer than the request that is refused. And where things lie on the server's machine is no business of
the network: what libraries and the operating system say likes to name files, and of a path its last part is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from reprlib import Repr
from typing import Any

from bridle.errors import AdapterRefused, BridleError, ControllerError, ControllerUnavailable, InvalidRequest

MAX_SHOWN_CHARS = 80
#: A path in quotes may have spaces; the address of a socket is one, too. An address in the web is none.
_QUOTED = re.compile(r"""(?<=['"])(?:unix:)?/(?:[^'"/\n]+/)+(?=[^'"/\n]+['"])""")
_PLAIN = re.compile(r"""(?:\bunix:(?://)?/?|(?<![\w/:.])/)(?:[^\s'"`/,;()<>]+/)+""")


class _Short(Repr):
    """`repr`, of the beginnings of things."""

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
        """In their own order: the base class sorts all keys first."""
        if level <= 0 and x:
            return "{...}"
        pairs = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join(pairs + ["..."] * (len(x) > self.maxdict)) + "}"


_short = _Short()


def shown(value: object) -> str:
    """A value as its `repr`, cut after some eighty characters."""
    text = _short.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def public_text(error: BridleError) -> str:
    """What a client reads of an error. One about a request says what the request said, and is told as it is; all others
    lose the server's folders."""
    text = str(error)
    return text if _is_about_the_request(error) else without_folders(text)


def without_folders(text: str) -> str:
    """Paths in a text, cut down to their last part."""
    return _PLAIN.sub("", _QUOTED.sub("", text))


def _is_about_the_request(error: BridleError) -> bool:
    if isinstance(error, (AdapterRefused, ControllerUnavailable)):
        return False
    return isinstance(error, (InvalidRequest, ControllerError))
