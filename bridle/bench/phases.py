"""The parts of a benchmark: which ones run, and how long they will take together.

The estimate of a part's duration has three terms. The first term is the model's work, at the measured speed of memory
and arithmetic: bytes that steps read, and matrix products for prompts. The second term is the sum of all fixed waiting
times. The third term is Python's own work: a rough number of seconds per part, scaled by the measured speed of Python.
Measured times of finished parts correct the estimate for the parts that have not run yet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.roofline import loop_rate, product_rate, read_bandwidth
from bridle.load_progress import PrintedSteps

if TYPE_CHECKING:
    from rich.console import Console

#: The approximate share of a limit that programs reach.
_REACHED = 0.4
#: Iterations of a Python loop per second on the machine on which the seconds for `MachineLimits.python` were measured.
_LOOPS = 35e6
#: Seconds between two messages about a running part if there is no terminal.
_SILENCE = 30.0


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Speeds of this machine, per second: bytes read, multiply-adds, and iterations of a Python loop."""

    bandwidth: float
    products: float
    loops: float = _LOOPS

    @classmethod
    def now(cls) -> MachineLimits:
        """Measure the speeds of this machine, which takes a second or two."""
        return cls(read_bandwidth(num_rounds=1, num_bytes=1 << 27), product_rate(), loop_rate())

    def seconds(self, checkpoint: BenchCheckpoint, prompt_tokens: float, num_steps: float) -> float:
        """Return roughly how many seconds a model takes to compute its prompts and then to run its decoding steps."""
        prompts = prompt_tokens * checkpoint.num_parameters / self.products
        return (prompts + num_steps * checkpoint.step_bytes / self.bandwidth) / _REACHED

    def python(self, seconds: float) -> float:
        """Scale a duration to this machine. The duration was measured on a machine that does `_LOOPS` loop iterations
        per second."""
        return seconds * _LOOPS / self.loops


class Phases:
    """The parts of a benchmark by name, with the estimated seconds of each part. The parts run in the order of this
    mapping.

    All output goes to standard error, because standard output is for the figures."""

    def __init__(
        self, guesses: Mapping[str, float], console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True, highlight=False)
        self._guesses, self._clock = dict(guesses), clock
        self._guessed = self._spent = 0.0  # of the finished parts
        self._num_done = 0

    def announce(self) -> None:
        """Print the number of parts and their estimated total time."""
        total, count = sum(self._guesses.values()), len(self._guesses)
        if not count:
            self._console.print("nothing is left to measure")
            return
        parts = "1 part" if count == 1 else f"{count} parts"
        self._console.print(f"{parts}, about {show_seconds(total)} if the load of the machine stays the same")

    @property
    def guessed(self) -> float:
        """Return the estimated seconds of all parts."""
        return sum(self._guesses.values())

    @property
    def spent(self) -> float:
        """Return the number of seconds that the finished parts took."""
        return self._spent

    @property
    def left(self) -> float:
        """Estimate the seconds of the remaining parts from the measured times of the finished parts."""
        left = self.guessed - self._guessed
        return left * (self._spent / self._guessed if self._guessed and self._spent else 1.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark a part of the benchmark as the running part. A terminal shows the part's progress next to its name and
        the remaining time."""
        number, count = self._num_done + 1, len(self._guesses)
        guess = self._guesses[name]
        began = self._clock()
        with _moving(self._console, f"part {number} of {count}: {name}, about {show_seconds(self.left)} left"):
            yield
        self._num_done, self._guessed = number, self._guessed + guess
        self._spent += self._clock() - began


@contextmanager
def _moving(console: Console, words: str) -> Iterator[None]:
    """Show a spinner while a part runs; output printed meanwhile appears above the spinner. Without a terminal, a long
    part prints a message from time to time."""
    if not console.is_terminal:
        with PrintedSteps(words, console, _SILENCE):
            yield
        return
    from rich.live import Live
    from rich.spinner import Spinner

    with Live(
        Spinner("dots", words),
        console=console,
        transient=True,
        refresh_per_second=12.5,
        redirect_stdout=sys.stdout.isatty(),
    ):
        yield


def show_seconds(seconds: float) -> str:
    """Return a duration as readable text."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
