"""The results of requests, stored in columns: a million results need some dozens of megabytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

QUANTILES = (0.5, 0.9, 0.99, 0.999)


class Records:
    """One entry for each answered request, in the order in which the requests ended. Times are in seconds, counts in
    tokens."""

    def __init__(self) -> None:
        self.began, self.first_at, self.over_at = array("d"), array("d"), array("d")
        self.num_prompt, self.num_cached, self.num_output = array("q"), array("q"), array("q")
        self.num_tries = array("q")
        self.num_turned_away = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self.began)

    def add(
        self,
        began: float,
        first_at: float,
        over_at: float,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        num_tries: int,
    ) -> None:
        """Add an answered request."""
        self.began.append(began)
        self.first_at.append(first_at)
        self.over_at.append(over_at)
        self.num_prompt.append(num_prompt)
        self.num_cached.append(num_cached)
        self.num_output.append(num_output)
        self.num_tries.append(num_tries)

    def after(self, moment: float) -> list[int]:
        """Return the indexes of requests that began at `moment` or later."""
        return [number for number, began in enumerate(self.began) if began >= moment]


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Return the mean and the quantiles by name, such as `p50` and `p99.9`; an empty result if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    named = {f"p{100 * share:g}": at_share(ordered, share) for share in QUANTILES}
    return {"mean": sum(ordered) / len(ordered), **named}


def at_share(ordered: Sequence[float], share: float) -> float:
    """Return the value below which the given share of all values lies."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
