"""`bridle explain`: shows a trace as tables and sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bridle.cli.terminal import harmless
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.traces import Trace
    from bridle.traces.explain import Explanation


def explain(
    path: Annotated[Path | None, Parameter(name="TRACE")] = None,
    /,
    *,
    top: int = 10,
    tokens: bool = True,
    schema: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Explain how a traced request got its tokens.

    `bridle generate "Once" --trace once.jsonl`, then `bridle explain once.jsonl` shows where the mask excluded tokens
    that the model preferred. The output also shows the time of controllers and the wasted work. The output is printed
    with a colour for the origin of each token.

    Parameters
    ----------
    path
        Trace file from `--trace`, `LLM.generate(trace=FILE)` or `GET /v1/traces/ID`.
    top
        Number of conflicts between mask and model to list.
    tokens
        Show the outputs in colours.
    schema
        Print only the JSON schema of a line of a trace file.
    """
    from rich.console import Console

    from bridle.traces import schema as schema_of_lines

    if schema:
        print(json.dumps(schema_of_lines(), indent=1))
        return 0
    if path is None or not path.is_file():
        raise InvalidRequest(f"there is no trace file {path}" if path else "explain takes the file of a TRACE", "TRACE")
    if top < 0:
        raise InvalidRequest(f"top is {top}; must not be negative", "top")
    console = Console(highlight=False, markup=False)
    for trace in _read(path):
        _show(console, trace, top, is_text_shown=tokens)
    return 0


def _read(path: Path) -> Iterator[Trace]:
    """Yield the traces in a file. While a large trace is read, the progress is shown on standard error."""
    from bridle.load_progress import shown
    from bridle.traces import read

    traces = read(path)
    while True:
        with shown(f"Reading {path}", prints=True):
            trace = next(traces, None)
        if trace is None:
            return
        yield trace


def _show(console: Console, trace: Trace, top: int, *, is_text_shown: bool) -> None:
    from bridle.traces.explain import explain as explain_trace

    found, header = explain_trace(trace), trace.header
    console.print(harmless(f"{header.request_id} on {header.model or 'an unnamed model'}, {header.made}"), style="bold")
    if header.runtime is not None:
        _show_operations(console, found)
    else:
        if is_text_shown:
            _show_texts(console, found)
        _show_outputs(console, found)
        _show_fights(console, found, top)
    for sentence in found.sentences:
        console.print(harmless(sentence, on_one_line=True), soft_wrap=True)


def _show_texts(console: Console, found: Explanation) -> None:
    from bridle.cli.token_colours import colour_text, legend

    for output in found.outputs:
        console.print(colour_text(found.trace, output.index), soft_wrap=True)
    console.print(legend(), soft_wrap=True)


def _show_outputs(console: Console, found: Explanation) -> None:
    from rich.table import Table

    table = Table("output", "of", "sampled", "forced", "drafted", "rolled back", "replaced", "ended")
    for each in found.outputs:
        parent = "" if each.parent is None else str(each.parent)
        counts = (each.num_sampled, each.num_forced, each.num_drafted, each.num_rewound, each.num_replaced)
        table.add_row(str(each.index), parent, *map(str, counts), each.ended)
    console.print(table)


def _show_operations(console: Console, found: Explanation) -> None:
    from rich.table import Table

    table = Table("operation", "exchanges", "errors", "seconds", "longest", "its number")
    for each in found.operations.values():
        numbers = each.num_exchanges, each.num_refused, f"{each.seconds:.3f}", f"{each.longest:.3f}", each.slowest
        table.add_row(harmless(each.name), *map(str, numbers))
    console.print(table)


def _show_fights(console: Console, found: Explanation, top: int) -> None:
    from rich.table import Table

    if not found.fights or not top:
        return
    title = f"Where a mask overruled the model ({min(top, len(found.fights))} of {len(found.fights)})"
    table = Table(
        "output", "token", "sampled", "probability", "preferred", "probability", "allowed", "removed", title=title
    )
    for each in found.fights[:top]:
        table.add_row(
            str(each.output),
            str(each.at),
            harmless(repr(each.text)),
            f"{100 * each.own:.2g} %",
            harmless(repr(each.wanted)),
            f"{100 * each.chance:.1f} %",
            "all" if each.num_allowed is None else str(each.num_allowed),
            f"{100 * each.taken:.1f} %",
        )
    console.print(table)
