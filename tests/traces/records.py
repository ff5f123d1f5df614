"""Generate records of every kind for property tests, from the types of their fields."""

from __future__ import annotations

from dataclasses import fields
from html.parser import HTMLParser
from typing import Any, get_type_hints

from hypothesis import strategies as st

from bridle.traces import (
    KINDS,
    Cost,
    Draw,
    Odds,
    TraceHeader,
)

INTEGERS = st.integers(0, 1 << 53)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(max_size=5)
ANY = st.recursive(st.none() | st.booleans() | INTEGERS | WORDS, lambda inner: st.lists(inner, max_size=2))
PLAIN = st.dictionaries(WORDS, st.none() | st.booleans() | INTEGERS | WORDS, max_size=2)
_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    float: NUMBERS,
    str: WORDS,
    bool: st.booleans(),
    bytes: st.binary(max_size=5),
    None | str: st.none() | WORDS,
    None | int: st.none() | INTEGERS,
    int | str | None: st.none() | INTEGERS | WORDS,
    list[int]: st.lists(INTEGERS, max_size=3),
    list[str]: st.lists(WORDS, max_size=3),
    tuple[tuple[str, str], ...]: st.lists(st.tuples(WORDS, WORDS), max_size=3).map(tuple),
    tuple[str, ...]: st.lists(WORDS, max_size=3).map(tuple),
    tuple[tuple[int, float], ...]: st.lists(st.tuples(INTEGERS, NUMBERS), max_size=3).map(tuple),
    tuple[tuple[int, float | None], ...]: st.lists(st.tuples(INTEGERS, st.none() | NUMBERS), max_size=3).map(tuple),
    dict[str, int]: st.dictionaries(WORDS, INTEGERS, max_size=3),
    dict[str, Any]: PLAIN,
    Any: ANY,
    None | dict[str, Any]: st.none() | PLAIN,
}


def made(kind: type[Any], **own: Any) -> st.SearchStrategy[Any]:
    """Generate objects of a class of `bridle.traces`. `own` are strategies for single fields. An unknown type is an
    error, so that new fields are also tested."""
    types = get_type_hints(kind)
    values = {each.name: own[each.name] if each.name in own else _LEAVES[types[each.name]] for each in fields(kind)}
    return st.builds(kind, **values)


_LEAVES[Odds] = made(Odds)
_LEAVES[Odds | None] = st.none() | _LEAVES[Odds]
DRAWS = made(Draw)
_LEAVES[Draw | None] = st.none() | DRAWS
_LEAVES[Cost | None] = st.none() | made(Cost)
HEADERS = made(TraceHeader, version=st.just(TraceHeader("").version))
RECORDS = st.one_of([made(kind) for kind in KINDS.values()])
HOSTILE = '<script>alert("x")</script>\'"&<img src=x onerror=y>'


class Reader(HTMLParser):
    """A parser that collects the elements, attribute names and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data
