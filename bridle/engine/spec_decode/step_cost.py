"""Measures the cost of one more row or token in a step, and the acceptance rates of drafts. The estimates come from
recent steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


class StepCost:
    """Model of the duration of a step in seconds. The duration is linear in the number of rows with logits and of other
    tokens, which cost less. The model is fitted to recent steps by least squares."""

    #: Assumed cost of a row, as a share of a step, until steps of different sizes were seen; and the maximum share of
    #: the average cost per row, because many tokens are computed more cheaply than few.
    FIRST_SHARE, FIRST_EVEN = 0.1, 0.5
    #: Minimum variances for an estimate of the cost of one more: of a count, and the share of the variance of rows that
    #: further tokens do not explain.
    _LEAST_SPREAD, _LEAST_OWN = 0.25, 0.05
    #: Weight of earlier steps after each new step.
    _MEMORY = 0.98

    def __init__(self) -> None:
        self.num_steps = 0  # number of recorded steps
        self._weight = 0.0
        # Means of rows, further tokens and seconds; then the (co)variances of these three, times the weight.
        self._rows = self._others = self._seconds = 0.0
        self._rows_rows = self._others_others = self._rows_others = 0.0
        self._rows_seconds = self._others_seconds = 0.0
        self._row: float | None = None  # cost of a row, once it was computed

    @property
    def is_known(self) -> bool:
        """Return whether any step was recorded."""
        return self._weight > 0.0

    def note(self, num_rows: int, seconds: float, num_others: int = 0) -> None:
        """Add one step: update the weighted means and second moments, as in Welford's method."""
        self.num_steps += 1
        self._row = None
        kept = self._MEMORY * self._weight
        self._weight = kept + 1.0
        rows, others, late = num_rows - self._rows, num_others - self._others, seconds - self._seconds
        self._rows += rows / self._weight
        self._others += others / self._weight
        self._seconds += late / self._weight
        share = kept / self._weight
        self._rows_rows = self._MEMORY * self._rows_rows + share * rows * rows
        self._others_others = self._MEMORY * self._others_others + share * others * others
        self._rows_others = self._MEMORY * self._rows_others + share * rows * others
        self._rows_seconds = self._MEMORY * self._rows_seconds + share * rows * late
        self._others_seconds = self._MEMORY * self._others_seconds + share * others * late

    def fade(self) -> None:
        """Reduce the weight of old measurements. So drafts that were too expensive are tried again."""
        self._row = None
        for name in ("_weight", "_rows_rows", "_others_others", "_rows_others", "_rows_seconds", "_others_seconds"):
            setattr(self, name, self._MEMORY * getattr(self, name))
        for name in ("_seconds", "_rows_seconds", "_others_seconds"):
            setattr(self, name, self._MEMORY * getattr(self, name))

    def of_row(self) -> float:
        """Return the seconds that one more row with logits costs."""
        if self._row is None:
            self._row = self._fitted_row()
        return self._row

    def _fitted_row(self) -> float:
        if not self._weight:
            return self.FIRST_SHARE
        if self._own_spread() < self._LEAST_SPREAD * self._weight:
            return min(self.FIRST_SHARE, self.FIRST_EVEN / max(self._rows, 1.0)) * self._seconds
        return max((self._rows_seconds - self._slope() * self._others_seconds) / self._own_spread(), 0.0)

    def of_other(self) -> float:
        """Return the seconds that one more token without logits costs."""
        if not self._has_others():
            return 0.0
        return max((self._others_seconds - self.of_row() * self._rows_others) / self._others_others, 0.0)

    def of_step(self, num_rows: int, num_others: int = 0) -> float:
        """Return the seconds of a step with the given numbers of logits rows and of tokens without logits."""
        if not self._weight:
            return 1.0
        row, other = self.of_row(), self.of_other()
        seconds = self._seconds + (num_rows - self._rows) * row + (num_others - self._others) * other
        return max(seconds, 1e-9)

    def _has_others(self) -> bool:
        return self._others_others > 0.0 and self._others_others >= self._LEAST_SPREAD * self._weight

    def _slope(self) -> float:
        """Return the ratio of logits rows to other tokens in the recorded steps."""
        return self._rows_others / self._others_others if self._has_others() else 0.0

    def _own_spread(self) -> float:
        """Return the weighted variance of the rows that the number of other tokens does not explain; 0 if it explains
        nearly all of it."""
        own = self._rows_rows - self._slope() * self._rows_others
        return own if own >= self._LEAST_OWN * self._rows_rows else 0.0


class Average:
    """Weighted average of recent measurements, in seconds or rows."""

    __slots__ = ("_number", "_taken")

    def __init__(self) -> None:
        self._number = self._taken = 0.0

    @property
    def each(self) -> float:
        """Return the average; 0 before the first measurement."""
        return self._taken / self._number if self._number else 0.0

    def note(self, number: int, taken: float) -> None:
        """Add a measurement that covers several items together."""
        self._number = 0.98 * self._number + number
        self._taken = 0.98 * self._taken + taken

    def fade(self) -> None:
        """Reduce the weight of old measurements. So drafts that were too expensive are tried again."""
        self._taken *= 0.995


@dataclass(slots=True)
class AcceptanceRate:
    """Recent acceptance rate of draft tokens; older drafts have less weight."""

    #: Expected acceptance rate before the first guess. This prior has the weight of one guess.
    PRIOR: ClassVar = 0.6
    #: Weight of old guesses after each step with guesses, and after each step in which there may have been none.
    MEMORY: ClassVar = 0.95
    FADING: ClassVar = 0.99
    #: For large batches: the weight of all other sequences' guesses, as a number of the sequence's own guesses; and the
    #: number of standard errors that are subtracted from an estimate.
    OTHERS: ClassVar = 7.0
    CARE: ClassVar = 2.0

    num_right: float = 0.0
    num_tried: float = 0.0

    @property
    def chance(self) -> float:
        """Return the probability that a guessed token is right if the guesses before it are right."""
        return self.chance_from(self.PRIOR)

    def chance_from(self, prior: float) -> float:
        """Return the probability as in `chance`, but with `prior` as its prior."""
        return min((self.num_right + prior) / (self.num_tried + 1.0), 1.0)

    def chance_among(self, others: AcceptanceRate, least: float, num_sequences: int) -> float:
        """Return the probability for one of several sequences of a step; `others` counts the guesses of all sequences.
        In a batch, each sequence pays for a row, but a token that only one sequence gains does not shorten the step. So
        the guesses of the other sequences get more weight, and the estimate is reduced by some standard errors."""
        share, expected = 1.0 - 1.0 / max(num_sequences, 1), max(others.chance, least)
        weight = 1.0 + share * self.OTHERS
        chance = min((self.num_right + weight * expected) / (self.num_tried + weight), 1.0)
        error = math.sqrt(chance * (1.0 - chance) / (self.num_tried + others.num_tried + 1.0))
        return max(chance - share * self.CARE * error, 0.0)

    def note(self, num_guessed: int, num_right: int) -> None:
        """Count the right and wrong guesses of one step."""
        self.num_right = self.MEMORY * self.num_right + num_right
        self.num_tried = self.MEMORY * self.num_tried + min(num_right + 1, num_guessed)

    def decay(self, num_steps: int = 1) -> None:
        """Reduce the weight of old measurements, so that abandoned drafts are tried again."""
        kept = self.FADING**num_steps
        self.num_right *= kept
        self.num_tried *= kept
