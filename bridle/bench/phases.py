"""The parts of a benchmark: how long all of them will take, told at the start, and which of them runs.

A guess is made of a part's own work: bytes that its steps read and products that its prompts need, over what memory and
arithmetic units give just now, and waits whose length is set. What parts then take corrects what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.bench.checkpoints import Checkpoint
from bridle.bench.roof import product_rate, read_bandwidth

if TYPE_CHECKING:
    from rich.console import Console

#: The share of a limit that programs reach, roughly: a guess need not be better.
_REACHED = 0.4


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine gives: bytes read and numbers multiplied and added, in a second."""

    bandwidth: float
    products: float

    @classmethod
    def now(cls) -> Limits:
        """Measured in a second or two."""
        return cls(read_bandwidth(num_rounds=1, num_bytes=1 << 27), product_rate())

    def seconds(self, checkpoint: Checkpoint, prompt_tokens: int, num_steps: int) -> float:
        """About how long a model takes to read prompts, and then for steps of decoding."""
        prompts = prompt_tokens * checkpoint.num_parameters / self.products
        return (prompts + num_steps * checkpoint.step_bytes / self.bandwidth) / _REACHED


class Phases:
    """Parts by their names, and the seconds that each is guessed to take. They run in this order."""

    def __init__(
        self, console: Console, guesses: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._guesses, self._clock = console, dict(guesses), clock
        self._guessed = self._spent = 0.0  # of the parts that are done
        self._num_done = 0

    def announce(self) -> None:
        """Say how many parts there are, and about how long they take."""
        total, count = sum(self._guesses.values()), len(self._guesses)
        parts = "1 part" if count == 1 else f"{count} parts"
        self._console.print(f"{parts}, about {show_seconds(total)} if the machine stays as busy as it is now")

    @property
    def left(self) -> float:
        """Seconds that the parts which are not done will take, by what the others took."""
        left = sum(self._guesses.values()) - self._guessed
        return left * (self._spent / self._guessed if self._guessed and self._spent else 1.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The part that runs now; on a terminal its number moves beside its name and what is left."""
        number, count = self._num_done + 1, len(self._guesses)
        began = self._clock()
        words = f"part {number} of {count}: {name}, about {show_seconds(self.left)} left"
        with self._console.status(words):  # nothing is shown where there is no terminal
            yield
        self._num_done, self._guessed = number, self._guessed + self._guesses[name]
        self._spent += self._clock() - began


def show_seconds(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
