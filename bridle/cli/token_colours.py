"""Tokens in the colours of where they came from, in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bridle.cli.terminal import harmless
from bridle.traced.colours import ORIGINS, origin_of, spans
from bridle.traced.rebuild import rebuild
from bridle.traced.records import Record, Replaced, Rewind, Token

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from bridle.traced.records import Trace


def colour_text(trace: Trace, index: int, *, prompt: bool = True) -> Text:
    """An output with its prompt."""
    from rich.text import Text

    return Text.assemble(
        *((harmless(each.text), ORIGINS[each.origin][0]) for each in spans(trace, index, prompt=prompt))
    )


def legend() -> Text:
    """What the colours mean."""
    from rich.text import Text

    parts = [(f" {origin} ", style) for origin, (style, _) in ORIGINS.items()]
    return Text.assemble(("(", "dim"), *parts, (")", "dim"))


def show_traces(traces: Iterable[Trace]) -> None:
    """Print the outputs of traces, forks with their number."""
    from rich.console import Console

    console = Console(highlight=False)
    for trace in traces:
        outputs = rebuild(trace)
        for output in outputs:
            if len(outputs) > 1:
                console.print(f"[{output.index}]", style="bold", markup=False)
            console.print(colour_text(trace, output.index), soft_wrap=True)
    console.print(legend(), soft_wrap=True)


class TokenPrinter:
    """Prints the tokens of output 0 as they come. What is taken back is told, since a terminal keeps what it has."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def print(self, record: Record) -> None:
        """Print what a record adds."""
        match record:
            case Record() if record.output:
                return
            case Token():
                self._write(record.text, ORIGINS[origin_of(record)][0])
            case Rewind() if record.num_tokens:
                self._write(f"«-{record.num_tokens}»", ORIGINS["rewound"][0])
            case Replaced():
                self._write(record.spelled, ORIGINS["rewound"][0])

    def _write(self, text: str, style: str) -> None:
        self._console.print(harmless(text), style=style, end="", markup=False, soft_wrap=True)
