"""Translates GBNF, llama.cpp's notation for grammars, to Lark's notation. SGLang's EBNF is the same notation as GBNF.

A rule of GBNF is `name ::= ...`, and the text is derived from the rule `root`. Every character becomes a terminal of
its own, so that no terminal consumes characters of another one, and the grammar keeps its exact meaning. If a part
cannot be translated, the error names its line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr
from bridle.structured_output.checks import PARAM

MAX_REPEATS = 2_000

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)|(?P<line>\n)|(?P<defines>::=)|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<chars>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{[ ]*[0-9]*[ ]*,?[ ]*[0-9]*[ ]*\})|(?P<mark>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_IS_GBNF = re.compile(r"^\s*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in GBNF, which is recognized by the syntax of its rules."""
    return _IS_GBNF.search(grammar) is not None


def gbnf_to_lark(grammar: str) -> str:
    """Return the same grammar in Lark's notation. Raises `InvalidRequest`, which names the line with the error."""
    tokens = _tokens(grammar)
    rules = _Rules()
    position = 0
    while position < len(tokens):
        position = _rule(tokens, position, rules)
    return rules.lark()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass(slots=True)
class _Rules:
    """The translated rules, with numbers instead of names, and the first line that uses each name."""

    bodies: dict[str, str] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=lambda: {"root": 1})
    numbers: dict[str, int] = field(default_factory=dict)

    def named(self, name: str, line: int) -> str:
        self.used.setdefault(name, line)
        return f"r{self.numbers.setdefault(name, len(self.numbers))}"

    def lark(self) -> str:
        for name, line in self.used.items():
            if name not in self.bodies:
                where = "" if name == "root" else f" on line {line}"
                raise _refusal(f"rule {short_repr(name)} is not defined{where}")
        rules = [f"r{self.numbers[name]}: {body}" for name, body in self.bodies.items() if name in self.numbers]
        return "\n".join([f"start: {self.named('root', 1)}", *rules, ""])


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar in GBNF: {message}", PARAM)


def _tokens(grammar: str) -> list[_Token]:
    found: list[_Token] = []
    position, line = 0, 1
    while position < len(grammar):
        match = _TOKEN.match(grammar, position)
        if match is None:
            raise _refusal(f"line {line} has a syntax error at {short_repr(grammar[position : position + 20])}")
        position = match.end()
        kind = str(match.lastgroup)
        if kind == "line":
            line += 1
        elif kind != "space":
            found.append(_Token(kind, match.group(), line))
    return found


def _rule(tokens: list[_Token], position: int, rules: _Rules) -> int:
    """Read one rule. Returns the position where the next rule begins."""
    name = tokens[position]
    if name.kind != "name" or position + 1 >= len(tokens) or tokens[position + 1].kind != "defines":
        raise _refusal(f"line {name.line} has {short_repr(name.text)} instead of a new rule: NAME ::= ...")
    if name.text in rules.bodies:
        raise _refusal(f"line {name.line} defines {short_repr(name.text)} again")
    position += 2
    body = _Body()
    while position < len(tokens) and not _begins_rule(tokens, position):
        _add(body, tokens[position], rules)
        position += 1
    rules.named(name.text, name.line)
    rules.bodies[name.text] = body.end(name)
    return position


def _begins_rule(tokens: list[_Token], position: int) -> bool:
    return position + 1 < len(tokens) and tokens[position + 1].kind == "defines"


@dataclass(slots=True)
class _Body:
    """The right side of a rule in Lark's notation. `last` is the index of the rule's last element, to which a
    repetition applies; `opened` are the groups that are not closed yet."""

    words: list[str] = field(default_factory=list)
    last: int | None = None
    opened: list[tuple[int, int]] = field(default_factory=list)
    is_empty: bool = True  # whether the current alternative is empty
    is_repeated: bool = False  # whether the last element is repeated

    def add(self, word: str) -> None:
        self.last, self.is_empty, self.is_repeated = len(self.words), False, False
        self.words.append(word)

    def close_alternative(self) -> None:
        if self.is_empty:
            self.words.append('""')

    def end(self, name: _Token) -> str:
        if self.opened:
            raise _refusal(f"line {self.opened[-1][1]} opens a group that is not closed")
        self.close_alternative()
        return " ".join(self.words)


def _add(body: _Body, token: _Token, rules: _Rules) -> None:
    match token.kind:
        case "name":
            body.add(rules.named(token.text, token.line))
        case "text":
            body.add(_text(token))
        case "chars":
            body.add(_chars(token))
        case "repeat":
            _repeat(body, token)
        case "mark":
            _mark(body, token)
        case _:
            raise _refusal(f"line {token.line} has {token.text!r} where it is not allowed in a rule")


def _mark(body: _Body, token: _Token) -> None:
    match token.text:
        case ".":
            body.add("/(?s:.)/")
        case "(":
            body.opened.append((len(body.words), token.line))
            body.words.append("(")
            body.last, body.is_empty = None, True
        case ")":
            if not body.opened:
                raise _refusal(f"line {token.line} closes a group that was not opened")
            body.close_alternative()
            body.last, body.is_empty, body.is_repeated = body.opened.pop()[0], False, False
            body.words.append(")")
        case _:
            body.close_alternative()
            body.words.append("|")
            body.last, body.is_empty = None, True


def _repeat(body: _Body, token: _Token) -> None:
    if body.last is None:
        raise _refusal(f"line {token.line} has {token.text!r} with nothing before it to repeat")
    if body.is_repeated:
        raise _refusal(f"line {token.line} repeats a repetition: put the part before {token.text!r} in brackets")
    body.is_repeated = True
    least, comma, most = token.text.strip("{}").replace(" ", "").partition(",")
    if token.text[0] == "{":
        for number in (least, most):
            if len(number) > 9 or int(number or 0) > MAX_REPEATS:
                raise _refusal(f"line {token.line} repeats {number[:20]} times; at most {MAX_REPEATS}")
        if not least and not most:
            raise _refusal(f"line {token.line} has {token.text!r} without a number of repetitions")
        if most and int(most) < int(least or 0):
            raise _refusal(f"line {token.line} has the range {{{least},{most}}}; the second number must not be smaller")
        operator = f"{{{least or 0},{most}}}" if comma else f"{{{least}}}"
    else:
        operator = token.text
    body.words.insert(body.last, "(")
    body.words.append(")" + operator)


def _text(token: _Token) -> str:
    """Translate a quoted text to single characters."""
    chars = [json.dumps(char) if char.isascii() else json.dumps(char, ensure_ascii=False) for char in _plain(token)]
    return f"({' '.join(chars)})" if len(chars) > 1 else chars[0] if chars else '""'


def _chars(token: _Token) -> str:
    """Return a character class as a regex that names each character by its number."""
    inner = token.text[1:-1]
    negated = inner.startswith("^")
    points = _points(token, inner.removeprefix("^"))
    ranges: list[str] = []
    position = 0
    while position < len(points):
        char = points[position][0]
        low = high = ord(char)
        if position + 2 < len(points) and points[position + 1] == ("-", False):
            high = ord(points[position + 2][0])
            if high < low:
                raise _refusal(f"line {token.line} reverses a range {short_repr(char + '-' + points[position + 2][0])}")
            position += 2
        ranges.append(f"\\u{{{low:X}}}-\\u{{{high:X}}}" if high > low else f"\\u{{{low:X}}}")
        position += 1
    if not ranges:
        if negated:
            return "/(?s:.)/"
        raise _refusal(f"line {token.line} has a character class without characters")
    return f"/[{'^' * negated}{''.join(ranges)}]/"


def _plain(token: _Token) -> str:
    return "".join(char for char, _ in _points(token, token.text[1:-1]))


def _points(token: _Token, text: str) -> list[tuple[str, bool]]:
    """Return the characters of a text, each with a flag for whether it was escaped."""
    found: list[tuple[str, bool]] = []
    position = 0
    while position < len(text):
        if text[position] != "\\":
            found.append((text[position], False))
            position += 1
            continue
        match = _ESCAPE.match(text, position)
        code = next(filter(None, match.groups()[:3]), None) if match else None
        if match is None or (code is not None and (int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000)):
            raise _refusal(f"line {token.line} has an escape that is not a character: {short_repr(text[position:])}")
        other = match.group(4)
        if other is not None and other.isalnum() and other not in _PLAIN_ESCAPES:
            raise _refusal(f"line {token.line} has an unknown escape: {short_repr(match.group())}")
        found.append((_PLAIN_ESCAPES.get(other, other) if code is None else chr(int(code, 16)), True))
        position = match.end()
    return found
