"""Computes a guest's answers to draft tokens: clones of the guest get the tokens, one after the other.

A clone's logs and writes are part of its answer. If a clone's token is sampled, its output counts, and the clone
replaces the guest. So no callback runs twice. All other clones are dropped, and their memory is reused. Lookahead stops
at an answer that does more than sample one token, or if the guest fails or takes long. Lookahead is not possible for
guests that cannot be cloned: they are forked with their process, or use variables shared with other sequences.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec import UNSET

from bridle.aici.replies import ReadVar, WriteVar
from bridle.aici.runtime import messages as m
from bridle.aici.runtime.guest_protocol import GuestDecision
from bridle.aici.runtime.guest_sequence import GuestSequence
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.storage import SharedVariables, Variables
from bridle.aici.runtime.wasm import GuestFault
from bridle.errors import ControllerError

#: Maximum number of clones of a guest at a time.
MAX_AHEAD = 16
#: Milliseconds of processor time that a clone may use for one answer.
BUDGET_MS = 5.0
#: Seconds of processor time after which no further token is shown to clones, because the guest's own answer waits.
ENOUGH = 0.002
#: Maximum number of characters of text, and of bytes of masks, that are kept at a time.
_MAX_HELD, _MAX_MASKS = 64 << 10, 1 << 20


@dataclass(slots=True)
class _Told:
    """A clone that has seen a draft token, with the clone's output."""

    token: int
    hosted: GuestSequence
    writes: list[WriteVar]


class Refusing:
    """Replaces variables that a clone must not use, because other sequences share them. Every access raises an
    error."""

    def execute(self, command: ReadVar | WriteVar) -> bytes:
        """Refuse the command."""
        raise GuestFault(
            "a controller that is asked ahead of its step cannot use variables that other sequences may change"
        )

    def version(self, name: str) -> int:
        """Refuse the command."""
        raise GuestFault(
            "a controller that is asked ahead of its step cannot use variables that other sequences may change"
        )


class Lookahead:
    """The clones of one sequence. The thread that runs the sequence's callbacks uses the clones between two
    callbacks."""

    def __init__(self) -> None:
        self.told: list[_Told] = []
        self.spare: list[Instance] = []

    def tell(self, hosted: GuestSequence, tokens: list[int], *, is_alone: bool) -> list[m.LookaheadAnswer]:
        """Show draft tokens to clones. Returns the clones' answers, up to the first that does more than sample one
        token. `is_alone` means that no other sequence shares the guest's variables."""
        known: list[m.LookaheadAnswer] = []
        if not hosted.instance.program.facts.is_copyable:
            return known
        end = time.thread_time() + ENOUGH
        num_bytes = num_characters = size = 0
        last, variables = hosted, hosted.instance.variables
        for token in tokens[:MAX_AHEAD]:
            size += last.instance.memory.size
            # all clones together may use as much as one instance
            if size > hosted.instance.surroundings.limits.max_memory:
                break
            told = self._tell_clone(last, token, _own(variables, is_alone=is_alone))
            if told is None:
                break
            answer, clone = told
            known.append(answer)
            self.told.append(clone)
            num_bytes += sum(map(len, answer.masks))
            num_characters += len(answer.logs)
            if num_bytes > _MAX_MASKS or num_characters > _MAX_HELD or time.thread_time() > end:
                break
            last, variables = clone.hosted, clone.hosted.instance.variables
        return known

    def _tell_clone(
        self, source: GuestSequence, token: int, variables: Variables
    ) -> tuple[m.LookaheadAnswer, _Told] | None:
        """Show a draft token to a clone of `source`. Drops the clone and returns None if its answer does more than
        sample one token."""
        clone = None
        try:
            clone = source.clone(self.spare.pop() if self.spare else None, variables)
            choice = clone.step(0, [token], token, [clone.instance.seq_id], None, BUDGET_MS)
        except ControllerError:  # the guest itself reports the error if the token is sampled
            if clone is not None:
                clone.instance.close()
            return None
        logs, writes = clone.instance.log.drain(), clone.instance.writes
        clone.instance.writes = []
        if not _is_plain_draw(choice):
            self.spare.append(clone.instance)
            return None
        masks = [memoryview(mask) for mask in choice.masks]
        return m.LookaheadAnswer(token, choice.branches, masks, logs, writes), _Told(token, clone, writes)

    def accept(self, hosted: GuestSequence, tokens: list[int], budget_ms: float) -> GuestSequence:
        """Return the sequence after `tokens` were sampled. A clone that has seen the tokens replaces the guest; tokens
        that no clone has seen are committed to the guest."""
        told = self.told
        for place, token in enumerate(tokens):
            if place < len(told) and told[place].token == token:
                hosted, told[place].hosted = told[place].hosted, hosted
                hosted.instance.variables = told[place].hosted.instance.variables
                for write in told[place].writes:
                    hosted.instance.variables.execute(write)
            else:
                hosted.step(0, [token], token, [hosted.instance.seq_id], None, budget_ms)
        return hosted

    def forget(self) -> None:
        """Release all clones; their memory is reused."""
        self.spare += [told.hosted.instance for told in self.told]
        self.told.clear()

    def close(self) -> None:
        """Free the memory of all clones."""
        self.forget()
        for instance in self.spare:
            instance.close()
        self.spare.clear()


def _own(variables: Variables, *, is_alone: bool) -> Variables:
    """Return the variables of one clone. Only clones of this clone see the clone's writes."""
    return variables.copy() if is_alone and isinstance(variables, SharedVariables) else Refusing()


def _is_plain_draw(choice: GuestDecision) -> bool:
    """Return whether the decision samples one token and has no splices."""
    if choice.wait is not None or len(choice.branches) != 1:
        return False
    (branch,) = choice.branches
    is_draw = branch.sample_mask is not None and not branch.splices and branch.top_logprobs in (UNSET, 0)
    return is_draw and branch.control_vectors is UNSET
