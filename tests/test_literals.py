"""Tests of Python literals in texts from models and clients."""

from __future__ import annotations

import warnings

from bridle.chat.tool_parsers.argument_values import read_keywords, read_value
from bridle.lmtp.command_line import parse_line


def test_odd_literals_give_no_warning() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert read_keywords(r"pattern='\d'") == {"pattern": r"\d"}
        assert read_value(r"['\d']", {"type": "array"}) == [r"\d"]
        assert parse_line(r"Hello stop='\d'").options == {"stop": r"\d"}
        assert not told
        warnings.warn("another", SyntaxWarning, stacklevel=1)
    assert len(told) == 1  # nobody else's warnings are hidden
