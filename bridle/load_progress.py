"""Reports the progress of a long task. A terminal shows a moving bar; otherwise lines go to standard error or to the
log from time to time.

This module does not depend on models. Code that loads something calls a `Report` with its current stage and its
progress, from 0 to 1. The progress of a separate stage, such as a download before loading, begins at 0 again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, float], None]

_log = logging.getLogger(__name__)
#: Within a stage, minimum progress and minimum number of seconds between two lines.
_STEP, _SECONDS = 0.1, 5.0
#: Maximum number of seconds without a line, for a task that prints its progress.
_SILENCE = 10.0
#: The `Report` for downloads in this thread that have no other one.
_watching: ContextVar[Report | None] = ContextVar("watching", default=None)


def silent(stage: str, share: float) -> None:
    """Report nothing. A `Report` that shows nothing."""


def part_of(begin: float, end: float, share: float) -> float:
    """Return the overall progress when a share `share` of a stage is done. The stage covers the range from `begin` to
    `end`. The progress is exactly `begin` if `share` is 0, and exactly `end` if `share` is 1."""
    return begin * (1.0 - share) + end * share


class LoggedSteps:
    """A `Report` that writes log lines at the beginning and at the end, and from time to time between. Stages that
    follow each other quickly are logged at the debug level."""

    def __init__(self, title: str, log: logging.Logger = _log, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._log, self._clock = title, log, clock
        self._stage, self._share = "", 0.0
        self._at = 0.0  # the last line that is not for debugging
        self._is_told = False  # the stage

    def __call__(self, stage: str, share: float) -> None:
        now = self._clock()
        is_late = now >= self._at + _SECONDS
        if stage != self._stage:
            self._is_told = is_late or not self._stage or share >= 1.0
            self._log.log(logging.INFO if self._is_told else logging.DEBUG, "%s: %s", self._title, stage)
        elif is_late and (share >= self._share + _STEP or not self._is_told):
            self._is_told = True
            self._log.info("%s: %s, %.0f%%", self._title, stage, 100 * share)
        else:
            return
        self._stage, self._share = stage, share
        if self._is_told:
            self._at = now


class PrintedSteps:
    """A `Report` that prints a line at least every `silence` seconds, even if no progress is reported. A thread prints
    the lines. A task that ends sooner prints nothing."""

    def __init__(self, title: str, console: Console, silence: float = _SILENCE) -> None:
        self._title, self._console, self._silence = title, console, silence
        self._stage, self._share, self._began = "", 0.0, time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridle-progress", daemon=True)

    def __call__(self, stage: str, share: float) -> None:
        self._stage, self._share = stage, share

    def __enter__(self) -> PrintedSteps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._silence):
            self._console.print(
                self.line(time.monotonic() - self._began), markup=False, highlight=False, soft_wrap=True
            )

    def line(self, seconds: float) -> str:
        """Return the line to print after `seconds` seconds."""
        stage = f": {self._stage}, {100 * self._share:.0f}%" if self._stage else ""
        return f"{self._title}{stage}, {seconds:.0f} s so far"


@contextmanager
def shown(
    title: str, *, is_wanted: bool = True, prints: bool = False, console: Console | None = None
) -> Iterator[Report]:
    """Yield a `Report` that moves a bar on standard error; the bar disappears at the end. If standard error is not a
    terminal, lines are written to the log, or to standard error if `prints` is set. Downloads inside the block are
    reported too. If `is_wanted` is False, no progress is shown."""
    if not is_wanted:
        yield silent
        return
    from rich.console import Console

    console = console or Console(stderr=True)
    with _shown_on(title, console, prints=prints) as report, watched(report):
        yield report


def _shown_on(title: str, console: Console, *, prints: bool) -> AbstractContextManager[Report]:
    if console.is_terminal:
        return _bar(title, console)
    return PrintedSteps(title, console) if prints else nullcontext(LoggedSteps(title))


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """Show progress as `shown` does, but only if standard error is a terminal."""
    with shown(title, is_wanted=sys.stderr.isatty()) as report:
        yield report


@contextmanager
def watched(report: Report) -> Iterator[None]:
    """Report downloads of this thread to `report` inside the block."""
    token = _watching.set(report)
    try:
        yield
    finally:
        _watching.reset(token)


def on_download() -> Callable[[float], None]:
    """Return a callback that reports the progress of a download in this thread."""
    report = _watching.get() or silent
    return lambda share: report("downloading", share)


@contextmanager
def _bar(title: str, console: Console) -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    words, percent = TextColumn("{task.description}"), TextColumn("{task.percentage:>3.0f}%")
    with Progress(words, BarColumn(), percent, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def report(stage: str, share: float) -> None:
            bar.update(task, description=f"{title}: {stage}" if stage else title, completed=share)

        yield report
