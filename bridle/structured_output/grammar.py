"""Converts a constraint to the grammar that llguidance reads: a list of small grammars that refer to each other.

The text begins with the first grammar of the list. Each leaf of a combination gets its own grammar and lexer, so that
the terminals of different leaves cannot conflict. This module does not compile grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from bridle.structured_output import spec
from bridle.structured_output.gbnf import gbnf_to_lark
from bridle.structured_output.schema_limits import bounded
from bridle.structured_output.schema_rewriter import equivalent_text
from bridle.structured_output.yacc import yacc_to_lark

Grammar = dict[str, Any]

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: A text without spaces at its beginning and end.
_NO_OUTER_SPACE = r"/\S((?s:.)*\S)?/"


def grammar_of(constraint: spec.Constraint, *, in_other_words: bool = False) -> str:
    """Return the grammar as llguidance's JSON text. With `in_other_words`, schemas are rewritten to keywords that
    llguidance supports. Raises `InvalidRequest` for a constraint that cannot be translated."""
    grammars: list[Grammar] = []
    _add(constraint, grammars)
    if in_other_words:
        for grammar in grammars:
            if "json_schema" in grammar:
                grammar["json_schema"] = json.loads(equivalent_text(json.dumps(grammar["json_schema"])))
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


#: A special token in a grammar's text, and its replacement without a vocabulary: a character that no text contains.
_SPECIAL = re.compile(r"<\[\d+\]>")
_STAND_IN = r"\"\uf8ff\""


def without_tokens(grammar: str) -> str:
    """Return a grammar's JSON text with a character in place of each special token, for a test without a vocabulary."""
    return _SPECIAL.sub(lambda _: _STAND_IN, grammar)


def has_tokens(constraint: spec.Constraint) -> bool:
    """Return whether a part of the constraint is a grammar by the server that names special tokens."""
    parts: tuple[object, ...] = getattr(constraint, "parts", ())
    return isinstance(constraint, spec.TokenLark) or any(
        isinstance(part, spec.Constraint) and has_tokens(part) for part in parts
    )


def _add(constraint: spec.Constraint, grammars: list[Grammar]) -> str:
    """Add the constraint's grammar to `grammars`, and the grammars that it refers to. Return the name by which other
    grammars refer to the constraint's grammar."""
    name = f"g{len(grammars)}"
    grammars.append({"name": name})
    if isinstance(constraint, spec.Concat):
        made = _lark("start: " + " ".join(_refer(part, grammars) for part in constraint.parts))
    elif isinstance(constraint, spec.OneOf):
        made = _lark("start: " + " | ".join(_refer(part, grammars) for part in constraint.parts))
    elif isinstance(constraint, spec.After):
        rest = _refer(constraint.constraint, grammars)
        made = _lark(f"start: free {rest}\nfree[suffix={quoted(constraint.marker)}]: /(?s:.*)/")
    else:
        made = _LEAVES[type(constraint)](constraint)
    grammars[int(name[1:])].update(made)
    return name


def _refer(part: spec.Constraint, grammars: list[Grammar]) -> str:
    if isinstance(part, spec.Choice) and len(part.options) == 1:
        return quoted(part.options[0])
    return "@" + _add(part, grammars)


def _regex(constraint: spec.Regex) -> Grammar:
    from llguidance import regex_to_lark

    pattern = regex_to_lark(constraint.pattern, "d")
    return _lark(f"start: /{pattern}/" if pattern else 'start: ""')


def _json_schema(constraint: spec.JsonSchema) -> Grammar:
    return _json(constraint.schema, constraint.whitespace)


def _json_object(constraint: spec.JsonObject) -> Grammar:
    return _json('{"type": "object"}', constraint.whitespace)


def _json(schema: str, whitespace: spec.Whitespace) -> Grammar:
    own = json.loads(schema)
    own = bounded(own) if isinstance(own, dict) else own
    options = dict(_SEPARATORS) if whitespace == "fixed" else {}
    given = own.get("x-guidance")
    own["x-guidance"] = {**options, **(given if isinstance(given, dict) else {})}
    return {"json_schema": own}


def _choice(constraint: spec.Choice) -> Grammar:
    return _lark("start: OPTION\nOPTION: " + " | ".join(map(quoted, constraint.options)))


def _substring(constraint: spec.Substring) -> Grammar:
    end = f" {quoted(constraint.end)}" if constraint.end else ""
    if constraint.unit == "char":
        run = f"%regex {json.dumps({'substring_chars': constraint.text}, ensure_ascii=False)} & /(?s:.)+/"
    else:
        chunks = re.findall(r"\s|\S+", constraint.text)
        run = f"%regex {json.dumps({'substring_chunks': chunks}, ensure_ascii=False)} & {_NO_OUTER_SPACE}"
    return _lark(f"start: RUN{end}\nRUN: {run}")


def _lark(text: str) -> Grammar:
    return {"lark_grammar": text}


def quoted(text: str) -> str:
    """Return a literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


_LEAVES: dict[type[spec.Constraint], Callable[[Any], Grammar]] = {
    spec.Regex: _regex,
    spec.JsonSchema: _json_schema,
    spec.JsonObject: _json_object,
    spec.Lark: lambda constraint: _lark(constraint.grammar),
    spec.TokenLark: lambda constraint: _lark(constraint.grammar),
    spec.Yacc: lambda constraint: _lark(yacc_to_lark(constraint.grammar)),
    spec.Gbnf: lambda constraint: _lark(gbnf_to_lark(constraint.grammar)),
    spec.Choice: _choice,
    spec.Substring: _substring,
}
