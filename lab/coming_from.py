"""Writes the tables of docs/coming-from.md that are made from data.

python -m lab.coming_from            says whether the page has them as they are
python -m lab.coming_from --write    writes them
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from bridle.elsewhere.calls import ROUTES, WORDS, Word
from bridle.elsewhere.fields import FIELDS
from bridle.elsewhere.rows import Field, System
from bridle.http.anthropic.schemas import MessagesBody
from bridle.http.fields import Fields
from bridle.http.openai.embeddings import EmbeddingsBody
from bridle.http.openai.responses.schemas import ResponsesBody
from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.http.sglang.schemas import SglangBody
from bridle.http.tgi.schemas import GenerateBody, Parameters

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming-from.md"
BEGIN, END = "<!-- lab.coming_from begins -->", "<!-- lab.coming_from ends -->"
_USUAL: tuple[type[Fields], ...] = (CompletionBody, ChatBody)
#: Where a system's requests go.
BODIES: dict[System, tuple[type[Fields], ...]] = {
    "OpenAI": (*_USUAL, ResponsesBody, EmbeddingsBody),
    "Anthropic": (MessagesBody,),
    "SGLang": (*_USUAL, EmbeddingsBody, SglangBody),
    "TGI": (GenerateBody, Parameters),
}
#: What libraries have in place of fields.
_CALLED: tuple[System, ...] = ("guidance", "outlines", "LMQL", "Ray")


def meaning(row: Field, system: System) -> str:
    """What the page says of a field."""
    bodies = BODIES.get(system, (*_USUAL, EmbeddingsBody))
    if any(row.name in body.model_fields for body in bodies):
        return "the same"
    if row.here:
        return f"`{row.here}`; its own name is taken, too"
    if row.is_neutral:
        return f"absent, and cannot change a text: {row.why}"
    return f"absent, and refused: {row.why}"


def paths() -> frozenset[str]:
    """The routes that this server has."""
    from bridle.http.app import ROUTERS

    return frozenset(str(getattr(route, "path", "")) for router in ROUTERS for route in router.routes) | PROBES


#: What the door answers, before any route.
PROBES = frozenset({"/health", "/ping"})


def said(word: Word) -> str:
    """What the page says of a word."""
    here = [f"`{name}=`" for name in word.keywords] + [f"`LLM.{name}`" for name in word.members]
    here += [f"`{name}`" for name in word.settings]
    if not here:
        return f"absent: {word.why}"
    return ", ".join(here) + (f"; {word.why}" if word.why else "")


def tables() -> str:
    """The tables, one for each system."""
    return "\n".join([BEGIN, "", *_fields(), *_words(), *_routes(), END])


def _fields() -> Iterator[str]:
    for system in get_args(System):
        rows = [row for row in FIELDS if system in row.systems]
        if not rows:
            continue
        alike = sorted({row.name for row in rows if meaning(row, system) == "the same"})
        yield f"### Fields of {system}"
        yield ""
        text = "The same here: " + ", ".join(f"`{name}`" for name in alike) + "."
        yield from textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
        yield ""
        yield from _table((f"`{row.name}`", meaning(row, system)) for row in rows if row.name not in alike)


def _words() -> Iterator[str]:
    for system in _CALLED:
        yield f"### Words of {system}"
        yield ""
        yield from _table((f"`{word.name}`", said(word)) for word in WORDS if word.system == system)


def _routes() -> Iterator[str]:
    known = paths()
    yield "### Routes"
    yield ""
    rows = ((route, "the same" if route.path in known else f"absent: {route.why}") for route in ROUTES)
    yield from _table((f"`{route.path}` ({', '.join(route.systems)})", told) for route, told in rows)


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    lines = [f"| {there} | {here} |" for there, here in rows]
    if lines:
        yield from ("| There | Here |", "| --- | --- |", *lines, "")


def written(page: str) -> str:
    """The page with the tables in their place."""
    before, _, rest = page.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = written(page)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        print("docs/coming-from.md is not up to date: python -m lab.coming_from --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
