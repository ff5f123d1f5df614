"""Makes text from servers and models harmless before it is printed, so that it cannot control the terminal; and prints
the command line's own complaints."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

_SIGN = "\ufffd"
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), _SIGN)
_CONTROLS_BUT_SPACE = {code: sign for code, sign in _CONTROLS.items() if chr(code) not in "\n\t"}


def harmless(text: str, *, on_one_line: bool = False) -> str:
    """The text with a visible sign in place of escape and other control characters. Line ends and tabs stay, unless
    `on_one_line`."""
    return text.translate(_CONTROLS if on_one_line else _CONTROLS_BUT_SPACE)


def say(text: str) -> None:
    """Print a line on standard output: a harmless one to a terminal, the exact text to a file or a pipe."""
    print(harmless(text) if sys.stdout.isatty() else text, flush=True)


_is_json = False


def choose_form(*, is_json: bool) -> None:
    """Write error messages as JSON events, if the log is in JSON; otherwise as plain lines."""
    global _is_json
    _is_json = is_json


def complaint(text: str, level: str = "error") -> str:
    """A line for standard error, as the log of this process has them."""
    if not _is_json:
        return f"bridle: {text}\n"
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": text, "level": level, "timestamp": now}) + "\n"


def complain(text: str, level: str = "error") -> None:
    """Print a complaint on standard error."""
    sys.stderr.write(complaint(text, level))
