"""Text from elsewhere on a terminal of ours: what a server or a model says must not steer it."""

from __future__ import annotations

import sys

_SIGN = "\ufffd"
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), _SIGN)
_CONTROLS_BUT_SPACE = {code: sign for code, sign in _CONTROLS.items() if chr(code) not in "\n\t"}


def harmless(text: str, *, on_one_line: bool = False) -> str:
    """The text with a sign in place of escape and its like. Line ends and tabs stay, but where it keeps to one line."""
    return text.translate(_CONTROLS if on_one_line else _CONTROLS_BUT_SPACE)


def say(text: str) -> None:
    """A line on standard output: to a terminal a harmless one, to a file or a pipe as it is."""
    print(harmless(text) if sys.stdout.isatty() else text, flush=True)
