"""Makes text from servers and models harmless before it is printed, so that it cannot control the terminal."""

from __future__ import annotations

import sys

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
