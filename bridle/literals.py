"""Parses text that a client or a model wrote as a Python expression. The text is never evaluated."""

from __future__ import annotations

import ast
import warnings

_SOURCE = "<literal>"


def parse_expression(text: str) -> ast.expr:
    """Return the syntax tree of `text`. Raises the errors of `ast.parse`. Warnings are suppressed, because the operator
    cannot correct an odd escape in a client's text."""
    # Add a filter for this source only. `catch_warnings` would replace the filters of every thread.
    warnings.filterwarnings("ignore", module=_SOURCE)
    return ast.parse(text, _SOURCE, mode="eval").body
