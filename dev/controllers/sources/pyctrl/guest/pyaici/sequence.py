"""The sequence that this script steers: its tokens so far, and places in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from wit_world.imports import host

from pyaici.tokens import detokenize, token_bytes

#: The host's number for a sequence.
SeqId = int


@dataclass(frozen=True)
class Candidate:
    """A token that the model might have chosen, with its log-probability."""

    token: int
    logprob: float

    @property
    def text(self) -> str:
        return token_bytes(self.token).decode(errors="replace")

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)


@dataclass
class _State:
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    sampled: int | None = None  # what was drawn in the last step, kept or not
    candidates: list[Candidate] = field(default_factory=list)
    changes: list[tuple[int, int, int, str]] = field(default_factory=list)  # start, removed, added, policy
    probes: list[float] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)  # of control vectors, for the next answer


state = _State()


def begin(prompt: Sequence[int]) -> None:
    """The prompt is known."""
    state.tokens = list(prompt)
    state.num_prompt = len(prompt)


def apply(backtrack: int, tokens: Sequence[int]) -> None:
    """Tokens were taken back, and others appended."""
    if backtrack > len(state.tokens):
        raise ValueError(f"backtrack is {backtrack}, but there are only {len(state.tokens)} tokens")
    if backtrack:
        del state.tokens[-backtrack:]
    state.tokens += tokens


def get_tokens() -> list[int]:
    """All tokens so far, the prompt's included. Not to be changed."""
    return state.tokens


def get_prompt_len() -> int:
    """How many of them are the prompt's."""
    return state.num_prompt


def set_control_vectors(**scales: float) -> None:
    """Beyond AICI: set scales of control vectors that the request names, from the next token on."""
    state.scales.update({name: float(scale) for name, scale in scales.items()})


def get_probes() -> list[float]:
    """Beyond AICI: the readings of the request's probes where the last token was drawn; none if it was forced."""
    return state.probes


def take_scales() -> dict[str, float]:
    """The scales that were set since the last answer."""
    scales, state.scales = state.scales, {}
    return scales


def self_seq_id() -> int:
    """The host's number for this sequence; each fork has its own."""
    return host.sequence_id()


@cache
def get_config(name: str) -> int:
    """1 if the host can do it: `fork`, `backtrack`, `ff_tokens`, `when_sampled` (splices that depend on the draw)."""
    return int(host.has_capability(name))


def fork_supported() -> bool:
    """Whether the host can fork."""
    return bool(get_config("fork"))


def backtrack_supported() -> bool:
    """Whether the host can take tokens back."""
    return bool(get_config("backtrack"))


def num_changes() -> int:
    """How often something else came than the script wanted, because a policy does not allow that."""
    return len(state.changes)


class Label:
    """A place: after the last token so far. It moves with what policies change before it."""

    def __init__(self) -> None:
        self.ptr = len(get_tokens())

    @property
    def ptr(self) -> int:
        """How many tokens are before it. Inside of what was replaced it is where that begins."""
        for start, removed, added, _ in state.changes[self._seen :]:
            if self._place >= start + removed:
                self._place += added - removed
            elif self._place > start:
                self._place = start
        self._seen = num_changes()
        return self._place

    @ptr.setter
    def ptr(self, place: int) -> None:
        self._place, self._seen = place, num_changes()

    def tokens_since(self) -> list[int]:
        """The tokens after it."""
        return get_tokens()[self.ptr :]

    def text_since(self) -> str:
        """Their text."""
        return detokenize(self.tokens_since()).decode(errors="replace")
