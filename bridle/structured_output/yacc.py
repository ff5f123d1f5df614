"""AICI's yacc-like grammars, translated to Lark's notation.

    %start sum
    %%
    sum: NUMBER | sum "+" NUMBER ;
    NUMBER: "/[0-9]+/" ;
    SKIP: "/ +/" ;

A quoted text is a keyword, and `/.../` inside the quotes is a regex; there are no escapes. The rule `SKIP` lists the
texts that may stand between tokens. Declarations of precedence are ignored, because they only choose among derivations
of a text, and one is enough. Tokens are distinguished by the positions in which the grammar allows them, so keywords
are not reserved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from bridle.errors import InvalidRequest

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<mark>%%)
      | (?P<directive>%[A-Za-z_-]+)
      | (?P<quoted>"[^"\n]+"|'[^'\n]+')
      | (?P<name>[A-Za-z_][A-Za-z_0-9.]*)
      | (?P<sign>[:;|])""",
    re.VERBOSE | re.DOTALL,
)
_PRECEDENCE = ("%left", "%right", "%nonassoc", "%token", "%expect", "%expect-rr")
_SKIP = "SKIP"

Alternative = list[str]  # names, and quoted terminals


@dataclass(slots=True)
class _Grammar:
    start: str | None = None
    rules: dict[str, list[Alternative]] = field(default_factory=dict)


def yacc_to_lark(text: str) -> str:
    """Return a grammar in Lark's notation that allows the same texts. Raises `InvalidRequest`, which names the line
    with the error."""
    grammar = _read(text)
    start = grammar.start or next((name for name in grammar.rules if name != _SKIP), None)
    if start is None or start not in grammar.rules:
        raise InvalidRequest(f"the yacc grammar has no rule for its start {start!r}", "constraint")
    names = {name: f"r{i}" for i, name in enumerate(grammar.rules) if name != _SKIP}
    lines = [f"start: {names[start]}"]
    for alternative in grammar.rules.get(_SKIP, []):
        lines.append(f"%ignore {_ignored(alternative)}")
    for name, rule in names.items():
        bodies = [" ".join(_symbol(part, names) for part in one) or '""' for one in grammar.rules[name]]
        lines.append(f"{rule}: " + " | ".join(bodies))
    return "\n".join(lines) + "\n"


# -- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    place, line = 0, 1
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _wrong(line, f"unexpected text {text[place : place + 20]!r}")
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match[0], line)
        line += match[0].count("\n")
        place = match.end()


def _read(text: str) -> _Grammar:
    grammar = _Grammar()
    tokens = _tokens(text)
    _read_head(tokens, grammar)
    for token in tokens:
        if token.kind == "mark":
            break  # the code of a program follows, as in yacc
        if token.kind != "name":
            raise _wrong(token.line, f"a rule begins with a name, not {token.text!r}")
        grammar.rules.setdefault(token.text, []).extend(_read_rule(tokens, token))
    return grammar


def _read_head(tokens: Iterator[_Token], grammar: _Grammar) -> None:
    directive = ""
    for token in tokens:
        if token.kind == "mark":
            return
        if token.kind == "directive":
            directive = token.text
            if directive != "%start" and directive not in _PRECEDENCE:
                raise _wrong(token.line, f"unknown declaration {directive!r}")
        elif directive == "%start" and token.kind == "name" and grammar.start is None:
            grammar.start = token.text
        elif directive not in _PRECEDENCE:
            raise _wrong(token.line, f"unexpected {token.text!r} before %%")
    raise InvalidRequest("the yacc grammar has no line %%", "constraint")


def _read_rule(tokens: Iterator[_Token], name: _Token) -> list[Alternative]:
    colon = next(tokens, None)
    if colon is None or colon.text != ":":
        raise _wrong(name.line, f"no ':' follows the name {name.text!r}")
    alternatives: list[Alternative] = [[]]
    for token in tokens:
        if token.text == ";":
            return alternatives
        if token.text == "|":
            alternatives.append([])
        elif token.kind in ("name", "quoted"):
            alternatives[-1].append(token.text)
        elif token.text == "%prec":
            next(tokens, None)
        elif token.text != "%empty":
            raise _wrong(token.line, f"unexpected {token.text!r} in the rule of {name.text!r}")
    raise _wrong(name.line, f"no ';' ends the rule of {name.text!r}")


def _wrong(line: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"line {line} of the yacc grammar: {what}", "constraint")


# -- writing -----------------------------------------------------------------------------------------------


def _symbol(part: str, names: dict[str, str]) -> str:
    if part[0] in "\"'":
        return _terminal(part[1:-1])
    if part not in names:
        raise InvalidRequest(f"the yacc grammar has no rule for {part!r}", "constraint")
    return names[part]


def _terminal(text: str) -> str:
    if len(text) > 2 and text[0] == text[-1] == "/":
        return f"/{_slashes(text[1:-1])}/"
    return json.dumps(text, ensure_ascii=False)


def _ignored(alternative: Alternative) -> str:
    """Return the regex of texts that are skipped between tokens. The regex must not match the empty text, because
    skipping would then never end."""
    if len(alternative) != 1 or alternative[0][0] not in "\"'":
        raise InvalidRequest(f"{_SKIP} holds {' '.join(alternative)!r}; each must be one terminal", "constraint")
    terminal = _terminal(alternative[0][1:-1])
    return f"({terminal} & /(?s:.)+/)" if terminal[0] == "/" else terminal


def _slashes(pattern: str) -> str:
    """Escape those slashes of a regex that are not escaped yet."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
