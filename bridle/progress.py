"""Tells how far loading is: a bar that moves on a terminal, elsewhere lines in the log, at sensible steps.

It knows nothing of models. What loads calls a `Report` with its present stage and the share that is done, from 0 to 1;
a stage that is not part of the whole, such as a download before it, begins at 0 again.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, float], None]

_log = logging.getLogger(__name__)
#: Within a stage a line is written if so much more is done, and so many seconds have passed.
_STEP, _SECONDS = 0.1, 5.0
#: Who is told of downloads that nobody else watches, in the thread that downloads.
_watching: ContextVar[Report | None] = ContextVar("watching", default=None)


def silent(stage: str, share: float) -> None:
    """A `Report` that tells nobody."""


def part_of(begin: float, end: float, share: float) -> float:
    """The share of the whole at which a stage is that goes from `begin` to `end`: exactly these at its ends."""
    return begin * (1.0 - share) + end * share


class LoggedSteps:
    """A `Report` that writes a line for each new stage, and for long stages now and then."""

    def __init__(self, title: str, log: logging.Logger = _log, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._log, self._clock = title, log, clock
        self._stage, self._share, self._at = "", 0.0, 0.0

    def __call__(self, stage: str, share: float) -> None:
        now = self._clock()
        if stage != self._stage:
            self._log.info("%s: %s", self._title, stage)
        elif share >= self._share + _STEP and now >= self._at + _SECONDS:
            self._log.info("%s: %s, %.0f%%", self._title, stage, 100 * share)
        else:
            return
        self._stage, self._share, self._at = stage, share, now


@contextmanager
def shown(title: str, *, is_wanted: bool = True, console: Console | None = None) -> Iterator[Report]:
    """A `Report` that moves a bar on standard error, which disappears at the end; or that writes lines to the log if
    that is no terminal. Downloads within the block are told as well. Not `is_wanted`, it tells nobody."""
    if not is_wanted:
        yield silent
        return
    from rich.console import Console

    console = console or Console(stderr=True)
    with _bar(title, console) if console.is_terminal else nullcontext(LoggedSteps(title)) as report, watched(report):
        yield report


@contextmanager
def bar(title: str) -> Iterator[Report]:
    """As `shown`, but nobody is told if standard error is no terminal."""
    with shown(title, is_wanted=sys.stderr.isatty()) as report:
        yield report


@contextmanager
def watched(report: Report) -> Iterator[None]:
    """Tell `report` of downloads in this thread, in this block."""
    token = _watching.set(report)
    try:
        yield
    finally:
        _watching.reset(token)


def on_download() -> Callable[[float], None]:
    """What is told of a download in this thread."""
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
