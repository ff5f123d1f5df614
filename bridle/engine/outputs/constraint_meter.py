"""Measures how much probability a constraint removes from one output.

The engine reports tokens sampled under a mask, forced tokens and their log-probabilities. A *run* is a series of forced
tokens without a sampled token between them. A run is judged as a whole, when all of its tokens have log-probabilities.
The options of a scored choice are sampled as a whole, so their tokens do not count as forced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bridle.constraint_usage import ConstraintUsage, ForcedText
from bridle.engine.interfaces import TextDecoder

#: Maximum number of times that an output is rolled back because of an unlikely run. Later unlikely runs are only
#: counted.
MAX_FLOOR_REWINDS = 32


@dataclass(slots=True)
class ForcedRun:
    """A run of forced tokens from position `start` on. The first `num_scored` tokens of the run have the
    log-probability `logprob` in total."""

    start: int
    tokens: tuple[int, ...] = ()
    num_scored: int = 0
    logprob: float = 0.0
    is_below: bool = False

    @property
    def end(self) -> int:
        """Return the position after the last token of the run."""
        return self.start + len(self.tokens)


@dataclass(slots=True)
class ConstraintMeter:
    """The figures of the constraint report for one output so far. `floor` is the minimum log-probability of a run of
    forced tokens; a run below it counts as a failure. Positions count all tokens of the sequence. `num_chosen` tokens
    of the sampled option are not appended yet."""

    floor: float | None = None
    usage: ConstraintUsage = field(default_factory=ConstraintUsage)
    runs: list[ForcedRun] = field(default_factory=list)
    num_chosen: int = 0
    is_given_up: bool = False

    def copy(self) -> ConstraintMeter:
        """Return the meter for a fork of the output. The fork counts only the tokens that it samples itself."""
        runs = [replace(run) for run in self.runs]
        return ConstraintMeter(self.floor, ConstraintUsage(), runs, self.num_chosen, self.is_given_up)

    def add_choice(self, scores: Sequence[float], num_tokens: int) -> None:
        """Count a sampled option with `num_tokens` tokens; `scores` are the log-probabilities of all options."""
        self.usage.add_removed(max(0.0, 1.0 - math.fsum(map(math.exp, scores))))
        self.num_chosen = num_tokens

    def add_forced(self, position: int, token: int) -> None:
        """Record a token that was appended without being sampled."""
        if self.num_chosen:
            self.num_chosen -= 1
        elif self.runs and self.runs[-1].end == position and not self.runs[-1].num_scored:
            self.runs[-1].tokens += (token,)
        else:
            self.runs.append(ForcedRun(position, (token,)))

    def add_score(self, position: int, logprob: float) -> ForcedRun | None:
        """Record the log-probability of a token. Returns the run of forced tokens if this log-probability puts the run
        below the floor."""
        run = next((run for run in reversed(self.runs) if run.start <= position), None)
        if run is None or position != run.start + run.num_scored or position >= run.end:
            return None
        run.num_scored += 1
        run.logprob += logprob
        run.is_below = run.num_scored == len(run.tokens) and self.floor is not None and run.logprob < self.floor
        return run if run.is_below else None

    def truncate(self, num_tokens: int) -> None:
        """Forget the runs of forced tokens that do not lie completely within the first `num_tokens` tokens."""
        self.runs = [run for run in self.runs if run.end <= num_tokens]
        self.num_chosen = 0

    def may_rewind(self) -> bool:
        """Return whether this run of forced tokens may be rolled back."""
        return not self.is_given_up and self.usage.rewound_runs < MAX_FLOOR_REWINDS

    def report(self, decoder: TextDecoder | None, tokens: Sequence[int], start: int) -> ConstraintUsage:
        """Return the constraint figures of the complete output, which consists of `tokens` from index `start` on."""
        scored = [run for run in self.runs if run.num_scored == len(run.tokens)]
        least = min(scored, key=lambda run: run.logprob, default=None)
        usage = replace(self.usage, forced_runs=len(scored), runs_below_floor=sum(run.is_below for run in scored))
        if decoder is not None:
            usage.noncanonical_tokens = num_noncanonical(decoder, tokens, start)
        if least is not None:
            usage.least_likely = ForcedText(run_text(decoder, tokens, least), least.logprob)
        return usage


def run_text(decoder: TextDecoder | None, tokens: Sequence[int], run: ForcedRun) -> str:
    """Return the text of a run of forced tokens. `tokens` are all tokens of the sequence."""
    if decoder is None:
        return ""
    state = decoder.open(tokens[max(run.start - 1, 0) : run.start], False)
    return "".join([state.push(token) for token in run.tokens]) + state.flush()


def num_noncanonical(decoder: TextDecoder, tokens: Sequence[int], start: int) -> int:
    """Count the tokens from `start` on that the tokenizer would not produce for the same text at this place."""
    lead = tokens[max(start - 1, 0) : start]  # some tokenizers treat the beginning of a text differently
    placed, text = _placed(decoder, lead, tokens[start:])
    written, _ = _placed(decoder, lead, decoder.tokens_of(text))
    return len(placed - written)


def _placed(decoder: TextDecoder, lead: Sequence[int], tokens: Sequence[int]) -> tuple[set[tuple[int, int, int]], str]:
    """Return the placed tokens, and the text that `tokens` spell after `lead`. A placed token has the position of its
    end in the text, and its number among tokens with the same end."""
    state, parts, end, same = decoder.open(lead, False), list[str](), 0, 0
    found = set[tuple[int, int, int]]()
    for token in tokens:
        parts.append(state.push(token))
        same = 0 if parts[-1] else same + 1
        end += len(parts[-1])
        found.add((token, end, same))
    return found, "".join(parts) + state.flush()
