"""What a step may answer, and how the host hears it.

`MidProcessResult` is the whole answer of AICI's second generation; `PreProcessResult` and `PostProcessResult` belong
to the first, whose scripts run too. `sampling`, `bias`, `top_logprobs` and `wait` go beyond AICI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyaici.tokens import TokenSet, eos_token

#: Parameters of one draw that a script may set.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass
class Splice:
    """Take `backtrack` tokens back, append `ff_tokens`. After a draw: if the token is in `when_sampled` (empty:
    always), and `backtrack` counts it."""

    when_sampled: list[int] = field(default_factory=list)
    backtrack: int = 0
    ff_tokens: list[int] = field(default_factory=list)

    def add_splice(self, other: Splice) -> None:
        """Be this one and then the other, which must not depend on a draw."""
        if other.when_sampled:
            raise ValueError(f"a splice after {other.when_sampled} cannot be added to one that comes before the draw")
        inside = min(other.backtrack, len(self.ff_tokens))
        self.ff_tokens = [*self.ff_tokens[: len(self.ff_tokens) - inside], *other.ff_tokens]
        self.backtrack += other.backtrack - inside

    def lower(self) -> dict[str, Any]:
        return {"when_sampled": self.when_sampled, "backtrack": self.backtrack, "ff_tokens": self.ff_tokens}


@dataclass
class Branch:
    """One way to go on: draw a token of `sample_mask`, or (None) just the one splice."""

    sample_mask: TokenSet | None = None
    splices: list[Splice] = field(default_factory=list)
    temperature: float | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0

    @staticmethod
    def noop() -> Branch:
        """Nothing changes."""
        return Branch(splices=[Splice()])

    def is_splice(self) -> bool:
        """No draw, but one splice."""
        return self.sample_mask is None and len(self.splices) == 1 and not self.splices[0].when_sampled

    def lower(self) -> dict[str, Any]:
        branch: dict[str, Any] = {
            "sample_mask": None if self.sample_mask is None else self.sample_mask.lower(),
            "temperature": self.temperature,
            "splices": [splice.lower() for splice in self.splices],
        }
        if self.sampling:
            branch["sampling"] = checked_sampling(self.sampling)
        if self.bias:
            branch["bias"] = list(self.bias.items())
        if self.top_logprobs:
            branch["top_logprobs"] = self.top_logprobs
        return branch


class MidProcessResult:
    """The answer of a step: branches (none: stop), or a wait. `skip_me`: the step is over without the model."""

    def __init__(
        self,
        branches: Sequence[Branch] = (),
        *,
        stop: bool = False,
        skip_me: bool = False,
        wait: dict[str, Any] | None = None,
    ) -> None:
        self.branches = [] if stop else list(branches)
        if not all(isinstance(branch, Branch) for branch in self.branches):
            raise TypeError("a MidProcessResult is made of Branch objects")
        self.waiting = wait
        self.skip_me = skip_me

    @staticmethod
    def bias(bias: TokenSet, **sampling: float) -> MidProcessResult:
        """Draw one of these tokens, perhaps with other parameters, such as `temperature=0.3`."""
        return MidProcessResult([Branch(sample_mask=bias, sampling=sampling)])

    @staticmethod
    def splice(
        backtrack: int, ff_tokens: Sequence[int] | None = None, *, tokens: Sequence[int] | None = None
    ) -> MidProcessResult:
        """Take tokens back and append others."""
        if backtrack < 0:
            raise ValueError(f"backtrack is {backtrack}; must be at least 0")
        appended = list(ff_tokens if ff_tokens is not None else tokens or ())
        return MidProcessResult([Branch(splices=[Splice(backtrack=backtrack, ff_tokens=appended)])])

    @staticmethod
    def stop() -> MidProcessResult:
        """End this sequence."""
        return MidProcessResult()

    @staticmethod
    def noop() -> MidProcessResult:
        """Nothing in this step."""
        return MidProcessResult([Branch.noop()])

    @staticmethod
    def skip() -> MidProcessResult:
        """Go on with the script at once."""
        return MidProcessResult([Branch.noop()], skip_me=True)

    @staticmethod
    def wait(variable: str | None = None, newer_than: int = 0, ms: float | None = None) -> MidProcessResult:
        """Nothing until a variable is newer than that version, or so many milliseconds have passed."""
        return MidProcessResult(wait={"variable": variable, "newer_than": newer_than, "ms": ms})

    def is_skip(self) -> bool:
        return self.skip_me

    def is_splice(self) -> bool:
        """Whether a splice is all there is."""
        return len(self.branches) == 1 and self.branches[0].is_splice()

    @property
    def only_splice(self) -> Splice | None:
        """The splice, if that is all there is."""
        return self.branches[0].splices[0] if self.is_splice() else None

    def lower(self) -> dict[str, Any]:
        """As the host hears it. Masks are made now, and named in this call only."""
        if self.waiting is not None:
            return {"wait": self.waiting}
        return {"branches": [branch.lower() for branch in self.branches]}


@dataclass
class PreProcessResult:
    """First generation: what happens before a token is drawn."""

    suspended: bool = False
    num_forks: int = 1
    ff_tokens: list[int] = field(default_factory=list)

    @staticmethod
    def continue_() -> PreProcessResult:
        """Go on."""
        return PreProcessResult()

    @staticmethod
    def suspend() -> PreProcessResult:
        """Ask again in the next step."""
        return PreProcessResult(suspended=True)

    @staticmethod
    def fork(num_forks: int) -> PreProcessResult:
        """Go on in so many ways."""
        return PreProcessResult(num_forks=num_forks)

    @staticmethod
    def ff_tokens_pre(tokens: Sequence[int]) -> PreProcessResult:
        """Append tokens."""
        return PreProcessResult(ff_tokens=list(tokens))


@dataclass
class PostProcessResult:
    """First generation: what happens after a token was appended."""

    stop_seq: bool = False

    @staticmethod
    def continue_() -> PostProcessResult:
        """Go on."""
        return PostProcessResult()

    @staticmethod
    def stop() -> PostProcessResult:
        """End this sequence."""
        return PostProcessResult(stop_seq=True)

    @staticmethod
    def from_tokens(tokens: Sequence[int]) -> PostProcessResult:
        """End it if the model did."""
        return PostProcessResult(stop_seq=eos_token() in tokens)


def checked_sampling(sampling: Mapping[str, float | None]) -> dict[str, float]:
    """Without those that are None. Raises `TypeError` for a name that is none."""
    unknown = [name for name in sampling if name not in SAMPLING]
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}; a draw has {', '.join(SAMPLING)}")
    return {name: value for name, value in sampling.items() if value is not None}
