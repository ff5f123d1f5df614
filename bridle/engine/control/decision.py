"""A controller's decision about the next token of one sequence, in the terms of AICI. A `Decision` is a list of
branches. A decision with one branch continues the sequence, one with several branches forks it, and one with no
branches stops it. Each branch either samples or splices. Sampling may have a mask, a bias and its own parameters; a
splice rolls tokens back and appends others. A decision can also be to wait. Decisions are immutable plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from bridle.sampling import SamplingParams

#: Maximum number of draft tokens that a branch may propose.
MAX_PROPOSED = 4096

#: Variables of a request, each with the version that it must exceed to end a wait.
WaitsFor = tuple[tuple[str, int], ...]


class Awaited(Protocol):
    """Something outside of the engine that an output waits for, such as a tool call."""

    @property
    def is_done(self) -> bool:
        """Return whether the event has happened, so that the wait for it is over."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A condition of a splice: the sampled token is one that `mask` forbids."""

    mask: bytes

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and not mask_allows(self.mask, token)


@dataclass(frozen=True, slots=True)
class Splice:
    """Roll back `backtrack` tokens, then append `ff_tokens`.

    In a branch that samples, the splice applies if the sampled token is in `when_sampled` (empty: any token).
    `backtrack` then includes that token: 0 keeps it, 1 replaces it, k also rolls back k-1 older tokens. In a branch
    that does not sample, `when_sampled` must be empty, and `backtrack` is the number of tokens at the end of the
    sequence.
    """

    backtrack: int = 0
    ff_tokens: tuple[int, ...] = ()
    when_sampled: frozenset[int] | Outside = frozenset()


@dataclass(frozen=True, slots=True)
class Branch:
    """One way to continue a sequence, as part of a decision. `sampling` replaces the request's parameters for this one
    token. `top_logprobs` is the number of most probable tokens that the next `Ask` reports. `draft` are tokens that
    will probably be sampled next, unless tokens are rolled back. Draft tokens are computed in advance. Draft tokens
    change the speed, but not the output. Draft tokens are used until the first wrong one; the next draft replaces them.
    `control_vectors` are new scales of the request's control vectors, valid from the branch's first token on."""

    sample: bool = True
    mask: bytes | None = None
    bias: tuple[tuple[int, float], ...] = ()
    sampling: SamplingParams | None = None
    splices: tuple[Splice, ...] = ()
    top_logprobs: int = 0
    draft: tuple[int, ...] = ()
    control_vectors: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Token sequences among which the engine chooses one by its probability under the model, and appends it as a whole.
    With `is_reported`, the client gets the probabilities of all options."""

    tokens: tuple[tuple[int, ...], ...]
    is_reported: bool = False

    @property
    def longest(self) -> int:
        """Return the number of tokens in the longest option."""
        return max(map(len, self.tokens), default=0)


@dataclass(frozen=True, slots=True)
class Decision:
    """A controller's answer for one sequence. Build a decision with the class methods. `reason` is sent to the client
    when the decision stops the sequence.

    `waited` names the events that may end a wait. If `waited` is None, any event may end the wait, and so may time. If
    `waited` is a set of variables, only writes to these variables by outputs of the same request may end the wait. If
    `waited` is an empty set, only the controller itself ends the wait, when it is asked again. `awaited` are events
    outside of the engine. The controller is asked again once one of the events in `awaited` is done, and takes no time
    until then.
    """

    branches: tuple[Branch, ...] = ()
    is_wait: bool = False
    reason: str | None = None
    waited: WaitsFor | None = None
    awaited: tuple[Awaited, ...] = ()
    options: Options | None = None

    @classmethod
    def sample(
        cls,
        mask: bytes | None = None,
        *,
        bias: Iterable[tuple[int, float]] = (),
        sampling: SamplingParams | None = None,
        splices: Iterable[Splice] = (),
        top_logprobs: int = 0,
        draft: Iterable[int] = (),
        control_vectors: Mapping[str, float] | None = None,
    ) -> Decision:
        """Sample the next token."""
        is_usual = mask is None and sampling is None and not top_logprobs and control_vectors is None
        if is_usual and bias == () and splices == () and draft == ():
            return DRAW
        branch = Branch(True, mask, tuple(bias), sampling, tuple(splices), top_logprobs, tuple(draft), control_vectors)
        return cls((branch,))

    @classmethod
    def splice(
        cls, backtrack: int = 0, ff_tokens: Iterable[int] = (), *, control_vectors: Mapping[str, float] | None = None
    ) -> Decision:
        """Roll back `backtrack` tokens and append `ff_tokens`, without sampling."""
        splice = Splice(backtrack, tuple(ff_tokens))
        return cls((Branch(sample=False, splices=(splice,), control_vectors=control_vectors),))

    @classmethod
    def fork(cls, branches: Iterable[Branch]) -> Decision:
        """Continue this sequence with branch 0, and start a new output for each further branch."""
        return cls(tuple(branches))

    @classmethod
    def wait(cls, waited: WaitsFor | None = None) -> Decision:
        """Compute nothing now. The sequence keeps its KV, and its controller is asked again in the next step."""
        return cls(is_wait=True, waited=waited)

    @classmethod
    def wait_for(cls, *awaited: Awaited) -> Decision:
        """Keep the KV and compute nothing until one of `awaited` is done. The events in `awaited` are tool calls, as
        `view.tool` returns them."""
        if not awaited:
            raise ValueError("wait_for needs at least one tool call")
        return cls(is_wait=True, awaited=awaited)

    @classmethod
    def choose(
        cls, tokens: Iterable[Iterable[int]], mask: bytes | None = None, *, is_reported: bool = False
    ) -> Decision:
        """Append one of the token sequences in `tokens`. The engine scores all token sequences and chooses one by its
        total probability. If the longest sequence does not fit into the output, one token is sampled under `mask`
        instead. If there is no mask either, the decision is an error."""
        return cls((Branch(True, mask),), options=Options(tuple(map(tuple, tokens)), is_reported))

    @classmethod
    def stop(cls, reason: str | None = None) -> Decision:
        """End this output."""
        return cls(reason=reason)

    @property
    def is_draw(self) -> bool:
        """Return True if the first branch samples a token. If the first branch samples, the decision does not stop,
        wait or force tokens."""
        return bool(self.branches) and self.branches[0].sample

    @property
    def is_stop(self) -> bool:
        return not self.branches and not self.is_wait

    @property
    def is_forced(self) -> bool:
        """Return True if the decision has only one branch and this branch does not sample. A decision that does not
        sample can be applied without a logits row."""
        return len(self.branches) == 1 and not self.branches[0].sample

    @property
    def is_noop(self) -> bool:
        """Return True if the only branch neither samples nor rolls back nor appends. In AICI, a decision that changes
        nothing waits for one step."""
        if not self.is_forced:
            return False
        return not any(splice.backtrack or splice.ff_tokens for splice in self.branches[0].splices)

    @property
    def waits_for(self) -> WaitsFor | None:
        """Return the only events that can end this wait, as in `waited`. The result is None if the decision is not a
        wait, or if any event may end the wait."""
        return self.waited if self.is_wait else () if self.is_noop else None


#: Sample as usual: the answer of most controllers in most steps.
DRAW = Decision((Branch(),))


# -- masks as rows of bits ---------------------------------------------------------------------------------


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask row."""
    return (vocab_size + 31) // 32


def mask_of(tokens: Iterable[int], vocab_size: int) -> bytes:
    """Return the mask that allows exactly `tokens`. Raises `ValueError` for tokens outside the vocabulary."""
    row = bytearray(4 * mask_words(vocab_size))
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab_size} tokens")
        row[token >> 3] |= 1 << (token & 7)
    return bytes(row)


def both_masks(mask: bytes | None, other: bytes) -> bytes:
    """Return the intersection of two masks; None stands for a mask that allows all tokens."""
    if mask is None:
        return other
    both = int.from_bytes(mask, "little") & int.from_bytes(other, "little")
    return both.to_bytes(len(other), "little")


def mask_allows(mask: bytes, token: int) -> bool:
    """Return whether `mask` allows `token`."""
    return 0 <= token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
