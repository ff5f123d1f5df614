"""Tokens in a terminal, in colours that show the origin of each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bridle.cli.terminal import harmless
from bridle.traces.highlight import ORIGINS, origin_of, spans
from bridle.traces.records import EndRecord, Record, ReplacedRecord, RewindRecord, TokenRecord
from bridle.traces.replay_text import rebuild

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from bridle.traces.records import Trace


def colour_text(trace: Trace, index: int, *, prompt: bool = True) -> Text:
    """Return an output as coloured text, after its prompt."""
    from rich.text import Text

    return Text.assemble(
        *((harmless(each.text), ORIGINS[each.origin][0]) for each in spans(trace, index, prompt=prompt))
    )


def legend() -> Text:
    """Return a legend of the colours."""
    from rich.text import Text

    parts = [(f" {origin} ", style) for origin, (style, _) in ORIGINS.items()]
    return Text.assemble(("(", "dim"), *parts, (")", "dim"))


def show_traces(traces: Iterable[Trace]) -> None:
    """Print the outputs of traces, in colours. If a request has several outputs, each output has its number."""
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
    """Prints the tokens of output 0 as they arrive, beginning on a new terminal line. Rolled-back text at the end of
    the line is struck through; for earlier text, a sign shows how many tokens were rolled back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._row = ""  # the end of the current row, which can be overwritten
        self._column = 0

    def print(self, record: Record) -> None:
        """Print the text that a trace record adds to the output."""
        match record:
            case Record() if record.output:
                return
            case TokenRecord():
                self._write(record.text, ORIGINS[origin_of(record)][0])
            case EndRecord():
                self._write(record.text, ORIGINS["sampled"][0])
            case RewindRecord() if record.num_tokens:
                self._strike(record)
            case ReplacedRecord() if self._console.is_terminal:  # a file has no colours to mark the text
                self._write(record.spelled, ORIGINS["rewound"][0])
                self._row = ""

    def _strike(self, rewind: RewindRecord) -> None:
        from rich.cells import cell_len
        from rich.control import Control
        from rich.segment import ControlType

        text, style = self._row[len(self._row) - rewind.num_chars :], ORIGINS["rewound"][0]
        if self._console.is_terminal and 0 < rewind.num_chars <= len(self._row):
            width = cell_len(text)
            self._console.control(Control((ControlType.CURSOR_BACKWARD, width)))
            self._column -= width
            self._write(text, style)
        else:
            self._write(f"«-{rewind.num_tokens}»", style)
        self._row = ""

    def _write(self, text: str, style: str) -> None:
        from rich.cells import cell_len

        text = harmless(text)
        self._console.print(text, style=style, end="", markup=False, soft_wrap=True)
        before, _, last = text.rpartition("\n")
        if before or text.startswith("\n"):
            self._row, self._column = "", 0
        self._row += last
        self._column += cell_len(last)
        if self._column >= self._console.width or "\t" in last:  # only the terminal knows the cursor's position then
            self._row = ""
            self._column %= self._console.width
