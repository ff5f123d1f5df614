"""Prints messages of the command line. Control characters are removed from the text of servers and models, so that the
text cannot control the terminal."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

_SIGN = "\ufffd"
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), _SIGN)
_CONTROLS_BUT_SPACE = {code: sign for code, sign in _CONTROLS.items() if chr(code) not in "\n\t"}


def harmless(text: str, *, on_one_line: bool = False) -> str:
    """Return the text with a visible sign instead of each control character. Line breaks and tabs stay, unless
    `on_one_line`."""
    return text.translate(_CONTROLS if on_one_line else _CONTROLS_BUT_SPACE)


def say(text: str) -> None:
    """Print a line on standard output: without control characters on a terminal, unchanged to a file or a pipe."""
    print(harmless(text) if sys.stdout.isatty() else text, flush=True)


_is_json = False


def choose_form(*, is_json: bool) -> None:
    """Choose the format of error messages: JSON events if `is_json`, otherwise plain lines."""
    global _is_json
    _is_json = is_json


def complaint(text: str, level: str = "error") -> str:
    """Return a line for standard error, in the log format of this process."""
    if not _is_json:
        return f"bridle: {text}\n"
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": text, "level": level, "timestamp": now}) + "\n"


def complain(text: str, level: str = "error") -> None:
    """Print a message on standard error."""
    sys.stderr.write(complaint(text, level))
