"""Writes the tables of docs/coming-from.md that are made from data.

`python -m dev.coming_from` says whether the page has the current tables; `python -m dev.coming_from --write` writes
them.
"""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from bridle.compat.cli_flags import FLAGS, MODEL, SERVE_MODEL, TAKEN, Flag
from bridle.compat.request_fields import BY_NAME, FIELDS
from bridle.compat.routes import ROUTES, Route
from bridle.compat.schema import CompatField, System
from bridle.http.anthropic.schemas import MessagesBody
from bridle.http.fields import Fields
from bridle.http.openai.embeddings import EmbeddingsBody
from bridle.http.openai.responses.schemas import ResponsesBody
from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.http.sglang.schemas import SglangBody
from bridle.http.tgi.schemas import GenerateBody, Parameters
from dev.compat import WORDS
from dev.compat.samplers import SAMPLERS, CompatSampler

#: Names of each system, by version: facts to compare the tables with.
NAMES = sorted((Path(__file__).resolve().parent / "names").glob("*.toml"))
PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming-from.md"
BEGIN, END = "<!-- dev.coming_from begins -->", "<!-- dev.coming_from ends -->"
_USUAL: tuple[type[Fields], ...] = (CompletionBody, ChatBody, ResponsesBody, EmbeddingsBody)
#: Classes of the request bodies that a system's requests use.
BODIES: dict[System, tuple[type[Fields], ...]] = {
    "Anthropic": (MessagesBody,),
    "SGLang": (*_USUAL, SglangBody),
    "TGI": (*_USUAL, GenerateBody, Parameters),
}
_FLAGS_HEAD = """\
## Flags

The tables list all flags of other servers in their current versions. If a flag has another name in bridle,
`bridle serve` accepts both names. If bridle does not have a flag, `bridle serve` refuses the flag with the reason in
the table. `--name-*` means all flags with this beginning. In Python, `LLM(...)` treats keywords with the names of these
flags in the same way, such as `gpu_memory_utilization=`."""
_FIELDS_HEAD = """\
## Fields of requests

The server never ignores a field that would change the output. The server applies such a field, or refuses the request
and names the alternative. The server ignores other unknown fields, unless
[`--strict-fields`](http.md#what-requests-may-say) is set. The table of vLLM includes the fields of its
`SamplingParams`. In Python, every unknown name is an error."""
_SAMPLERS_HEAD = """\
## Samplers

The table lists samplers, filters and penalties of other systems. [sampling.md](sampling.md) explains the samplers that
bridle has."""
#: Systems with Python libraries, which have calls instead of fields.
_CALLED: tuple[System, ...] = ("vLLM", "SGLang", "TGI", "guidance", "outlines", "LMQL", "Ray", "Pie")


def meaning(row: CompatField, system: System) -> str:
    """Return the page's text about a request field."""
    bodies = BODIES.get(system, _USUAL)
    if row.here == row.name or any(row.name in body.model_fields for body in bodies):
        return f"bridle has the same field; {row.why}" if row.here and row.why else "the same"
    if row.here:
        return f"bridle calls this field `{row.here}`, and accepts both names"
    if row.is_neutral:
        return f"bridle ignores this field: {row.why}"
    return f"bridle refuses this field: {row.why}"


def paths() -> frozenset[str]:
    """Return the paths of this server's routes."""
    from bridle.http.app import ROUTERS

    return frozenset(str(getattr(route, "path", "")) for router in ROUTERS for route in router.routes) | PROBES


#: Routes that the server answers before its routing.
PROBES = frozenset({"/health", "/ping"})


def tables() -> str:
    """Return the tables, one for each system."""
    return "\n".join([BEGIN, "", *_flags(), *_fields(), *_samplers(), *_words(), *_routes(), END])


def flag_meaning(row: Flag) -> str:
    """Return the page's text about a flag."""
    but = f"; {row.why}" if row.why else ""
    if row.is_same:
        return f"bridle has the same flag{but}" if but else "the same"
    if row.here == MODEL:
        return f"`bridle serve MODEL`, with or without this flag{but}"
    if row.is_shown or row.name in TAKEN:
        return f"bridle calls this flag `{row.here}`, and accepts both names{but}"
    return f"bridle refuses this flag: {row.why or f'use {row.here}'}"


def _flags() -> Iterator[str]:
    yield from _FLAGS_HEAD.splitlines()
    yield ""
    for system in get_args(System):
        rows = [row for row in (*FLAGS, *SERVE_MODEL) if system in row.systems]
        if not rows:
            continue
        yield f"### Flags of {system}"
        yield ""
        yield from versions(system, "flags")
        alike = sorted(row.name for row in rows if flag_meaning(row) == "the same")
        if alike:
            yield from _listed(alike)
        told: dict[str, list[str]] = {}
        for row in rows:
            if row.name not in alike:
                told.setdefault(flag_meaning(row), []).append(f"`{row.name}`")
        yield from _table((", ".join(names), text) for text, names in told.items())


def _samplers() -> Iterator[str]:
    yield from _SAMPLERS_HEAD.splitlines()
    yield ""
    yield from _table(
        (f"{sampler.name} ({', '.join(sampler.systems)})", sampler_meaning(sampler)) for sampler in SAMPLERS
    )


def sampler_meaning(sampler: CompatSampler) -> str:
    """Return the page's text about a sampler: its request fields in bridle, or the reason why it is absent."""
    rows = [BY_NAME[name] for name in sampler.fields]
    here = list(dict.fromkeys(f"`{row.here}`" for row in rows if row.here))
    if here:
        return ", ".join(here)
    return "bridle refuses this sampler: " + "; ".join(dict.fromkeys(row.why for row in rows if not row.is_neutral))


def _listed(names: Iterable[str]) -> Iterator[str]:
    text = "These names are the same in bridle: " + ", ".join(f"`{name}`" for name in names) + "."
    yield from textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
    yield ""


def _fields() -> Iterator[str]:
    yield from _FIELDS_HEAD.splitlines()
    yield ""
    for system in get_args(System):
        rows = [row for row in FIELDS if system in row.systems]
        if not rows:
            continue
        alike = sorted({row.name for row in rows if meaning(row, system) == "the same"})
        yield f"### Fields of {system}"
        yield ""
        yield from versions(system, "fields")
        if alike:
            yield from _listed(alike)
        told: dict[str, list[str]] = {}
        for row in rows:
            if row.name not in alike:
                told.setdefault(meaning(row, system), []).append(f"`{row.name}`")
        yield from _table((", ".join(names), text) for text, names in told.items())


def listed(system: System) -> dict[str, Any]:
    """Return the stored names of a system, with all names of one kind in one text."""
    found = (tomllib.loads(path.read_text(encoding="utf-8")) for path in NAMES)
    return next((each for each in found if each["system"] == system), {})


def names(kept: dict[str, Any], kind: str) -> list[str]:
    """Return a system's names of one kind: the names of its current version, then names that only earlier
    versions had."""
    return [name for each in (kept, *kept.get("earlier", {}).values()) for name in each.get(kind, "").split()]


def versions(system: System, kind: str) -> Iterator[str]:
    """Yield the line that names the versions of a system whose names a table lists."""
    kept = listed(system)
    version = kept.get("version", "")
    if version:
        before = [number for number, each in kept.get("earlier", {}).items() if kind in each]
        earlier = f", and of earlier versions back to {min(before, key=_numbers)}" if before else ""
        yield (
            f"These are the names of {system} {version}{earlier}."
            if version[0].isdigit()
            else f"These are the names of {system} ({version.removeprefix('of ')})."
        )
        yield ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def sent(system: System) -> dict[str, list[str]]:
    """Return the request fields that a library sends to servers, grouped by how bridle treats them."""
    fields: dict[str, list[str]] = {}
    bodies: tuple[type[Fields], ...] = (*_USUAL, Parameters)
    for name in names(listed(system), "sends"):
        row = BY_NAME.get(name)
        is_taken = any(name in body.model_fields for body in bodies)
        if is_taken or (row is not None and row.here):
            text = "bridle accepts these fields"
        elif row is None:
            raise LookupError(f"{system} sends {name!r}, which no table has")
        else:
            text = f"bridle {'ignores' if row.is_neutral else 'refuses'} this field: {row.why}"
        fields.setdefault(text, []).append(f"`{name}`")
    return fields


def _words() -> Iterator[str]:
    yield from ("## Libraries and programs", "")
    for system in _CALLED:
        yield f"### Words of {system}"
        yield ""
        yield from versions(system, "words")
        yield from _table((f"`{word.name}`", word.told) for word in WORDS if word.system == system)
        if fields := sent(system):
            yield f"Fields in requests of {system}'s clients:"
            yield ""
            yield from _table((", ".join(names), text) for text, names in fields.items())


def route_meaning(route: Route) -> str:
    """Return the page's text about a route."""
    if route.why:
        return f"bridle has no such route: {route.why}"
    return f"bridle has the same route, {route.but}" if route.but else "the same"


def _routes() -> Iterator[str]:
    yield "## Routes"
    yield ""
    systems: dict[tuple[str, str], list[str]] = {}
    for route in ROUTES:
        systems.setdefault((route.path, route_meaning(route)), []).extend(route.systems)
    told: dict[str, list[str]] = {}
    for (path, text), having in systems.items():
        told.setdefault(text, []).append(f"`{path}` ({', '.join(having)})")
    yield from _table((", ".join(paths), text) for text, paths in told.items())


def _linked(text: str) -> str:
    """Return a reason with its flags formatted as code and its pages as links; existing code stays unchanged."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"(?<![\w-])(--?[a-zA-Z][\w-]*)", r"`\1`", parts[place])
        parts[place] = re.sub(r"docs/([a-z-]+\.md)", r"[\1](\1)", parts[place])
    return "`".join(parts)


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    lines = [f"| {there} | {_linked(here)} |" for there, here in rows]
    if lines:
        yield from ("| Other system | bridle |", "| --- | --- |", *lines, "")


def written(page: str) -> str:
    """Return the page with the current tables."""
    before, _, rest = page.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = written(page)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        print("docs/coming-from.md is not up to date: python -m dev.coming_from --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
