"""Effects of a constraint on one output: how much probability its masks removed, and how likely its forced tokens were.

A constraint makes an output valid, but not likely. The figures of this module show where a valid output is unlikely
under the model. The figures are measured only for requests that ask for them (`constraint_report`, `constraint_floor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ForcedText:
    """Consecutive forced tokens: their text, and the text's log-probability (natural logarithm) under the model."""

    text: str
    logprob: float


@dataclass(slots=True)
class ConstraintUsage:
    """Constraint figures of one output, or of several outputs together.

    `removed_sum` is the sum of the probabilities that masks removed, over the `masked_tokens` tokens sampled under a
    mask. `removed_max` is the highest of the removed probabilities. A choice between scored options counts as one
    token. `least_likely` is the series of forced tokens with the lowest log-probability. `noncanonical_tokens` counts
    tokens that the tokenizer would not produce for the same text. `runs_below_floor` counts forced runs that stayed in
    the output although they are less likely than `constraint_floor`; `rewound_runs` counts forced runs that were rolled
    back.
    """

    masked_tokens: int = 0
    removed_sum: float = 0.0
    removed_max: float = 0.0
    forced_runs: int = 0
    least_likely: ForcedText | None = None
    noncanonical_tokens: int = 0
    runs_below_floor: int = 0
    rewound_runs: int = 0

    @property
    def removed_mean(self) -> float:
        """Return the mean probability that masks removed; 0 if no token had a mask."""
        return self.removed_sum / self.masked_tokens if self.masked_tokens else 0.0

    def add_removed(self, probability: float) -> None:
        """Count one token that was sampled under a mask. The mask removed tokens that had the probability `removed` in
        total."""
        self.masked_tokens += 1
        self.removed_sum += probability
        self.removed_max = max(self.removed_max, probability)

    def add(self, other: ConstraintUsage) -> None:
        """Add the constraint figures of another output."""
        for name in ("masked_tokens", "removed_sum", "forced_runs", "noncanonical_tokens", *_RUNS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.removed_max = max(self.removed_max, other.removed_max)
        found = [each for each in (self.least_likely, other.least_likely) if each is not None]
        self.least_likely = min(found, key=lambda each: each.logprob, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the constraint figures as plain data, in the form of `usage.constraint`."""
        least = self.least_likely
        return {
            "masked_tokens": self.masked_tokens,
            "removed_probability": {"sum": self.removed_sum, "mean": self.removed_mean, "max": self.removed_max},
            "forced_runs": self.forced_runs,
            "least_likely_run": None if least is None else {"text": least.text, "logprob": least.logprob},
            "noncanonical_tokens": self.noncanonical_tokens,
            "runs_below_floor": self.runs_below_floor,
            "rewound_runs": self.rewound_runs,
        }


_RUNS = ("runs_below_floor", "rewound_runs")
