"""What a token more or less in a step costs, and how often guesses are right: both by the steps of late."""

from __future__ import annotations


class StepCost:
    """Seconds of a step as a line over its tokens, fitted to the steps of late."""

    #: A row is taken to cost this share of a step until steps of different sizes were seen, and at most so much of its
    #: even share: many tokens are computed more cheaply than few.
    FIRST_SHARE, FIRST_EVEN = 0.1, 0.5

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self.num_steps = 0  # that were noted

    @property
    def is_known(self) -> bool:
        """Whether any step was noted."""
        return self._weight > 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take one step in."""
        self.num_steps += 1
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", num_tokens),
            ("_seconds", seconds),
            ("_squares", num_tokens * num_tokens),
            ("_products", num_tokens * seconds),
        ):
            setattr(self, name, 0.98 * getattr(self, name) + value)

    def of_row(self) -> float:
        """Seconds that one more token costs."""
        if not self._weight:
            return self.FIRST_SHARE
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        if spread < 0.25:
            return min(self.FIRST_SHARE, self.FIRST_EVEN / max(tokens, 1.0)) * seconds
        return max((self._products / self._weight - tokens * seconds) / spread, 0.0)

    def of_step(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        if not self._weight:
            return 1.0
        return max(self._seconds / self._weight + (num_tokens - self._tokens / self._weight) * self.of_row(), 1e-9)


class Average:
    """Seconds that one of something takes, by those of late."""

    __slots__ = ("_number", "_seconds")

    def __init__(self) -> None:
        self._number = self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Those of one; 0 before there was any."""
        return self._seconds / self._number if self._number else 0.0

    def note(self, number: int, seconds: float) -> None:
        """Take in what so many took together."""
        self._number = 0.98 * self._number + number
        self._seconds = 0.98 * self._seconds + seconds

    def fade(self) -> None:
        """Forget a little, so that what was too dear is tried again."""
        self._seconds *= 0.995


class Tally:
    """How many guesses were right of late; old ones count less and less."""

    #: What is expected before there was any guess; it counts as much as one guess does.
    PRIOR = 0.6
    #: What old guesses still count after others, and after a step in which there may have been none.
    MEMORY, FADING = 0.95, 0.99

    __slots__ = ("num_right", "num_tried")

    def __init__(self) -> None:
        self.num_right = self.num_tried = 0.0

    @property
    def chance(self) -> float:
        """That a guessed token is right if those before it are."""
        return self.chance_from(self.PRIOR)

    def chance_from(self, prior: float) -> float:
        """The same, where something else than usual is expected at first."""
        return min((self.num_right + prior) / (self.num_tried + 1.0), 1.0)

    def note(self, num_guessed: int, num_right: int) -> None:
        """Take in the guesses of one step."""
        self.num_right = self.MEMORY * self.num_right + num_right
        self.num_tried = self.MEMORY * self.num_tried + min(num_right + 1, num_guessed)

    def fade(self, num_steps: int = 1) -> None:
        """Forget a little, so that what was given up is tried again."""
        kept = self.FADING**num_steps
        self.num_right *= kept
        self.num_tried *= kept
