"""Flags for showing and storing the origin of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import Group, Parameter

from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.traces import Record, Trace


@Parameter(name="*", group=Group("Traces", sort_key=30))
@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Options for traces and coloured tokens."""

    trace: Path | None = None
    "File to write a trace to, as JSON lines. `bridle explain FILE` explains it."
    show: Literal["text", "tokens"] = "text"
    """Output form: `text`, or `tokens` in colours that show the origin of each token: sampled, draft, forced, changed
    by a mask, or rolled back."""

    @property
    def is_wanted(self) -> bool:
        """Return whether these flags need a trace of each request."""
        return self.trace is not None or self.show == "tokens"

    def check(self) -> None:
        """Raise `InvalidRequest` if the trace file cannot be written, before anything is computed."""
        if self.trace is not None and not self.trace.parent.is_dir():
            raise InvalidRequest(
                f"the trace cannot be written to {self.trace}: there is no folder {self.trace.parent}", "trace"
            )

    def printer(self, console: Console) -> Callable[[Record], None] | None:
        """Return a function that prints tokens as they arrive, or None to show text."""
        if self.show == "text":
            return None
        from bridle.cli.token_colours import TokenPrinter

        return TokenPrinter(console).print

    def keep(self, traces: list[Trace]) -> None:
        """Write the traces to the file, if `--trace` is set and there are traces."""
        if self.trace is not None and traces:
            from bridle.traces import write

            write(traces, self.trace)
