"""Maps the engine's sequences to llama.cpp's slots, and updates this mapping from step plans.

The engine's sequence numbers are unlimited, while llama.cpp has a fixed number of slots. After a fork, two sequences
share their KV in llama.cpp until one of the two sequences continues.

A recurrent state cannot be truncated. Copies of the state are therefore stored: before tokens that may be rolled back,
and at least every `_COPY_EVERY` tokens. A rolled-back sequence continues from the last copy before its new end, or from
its first token. The tokens after the copy are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bridle.engine.scheduling.step_plan import ForkRow, PlanRow, StepPlan
from bridle.errors import InternalError, OutOfBlocks

#: Maximum number of tokens between two copies of a state.
_COPY_EVERY = 64
#: Maximum bytes of all copies; the oldest copies are dropped first.
MAX_COPIES = 1 << 30


class SlotObserver(Protocol):
    """Interface of llama.cpp's slots, which can be cut, copied, saved and restored."""

    is_recurrent: bool
    num_slots: int

    def cut(self, slot: int, length: int) -> None: ...
    def copy(self, source: int, target: int, length: int) -> None: ...
    def state(self, slot: int) -> bytes: ...
    def restore(self, slot: int, state: bytes) -> None: ...


@dataclass(slots=True)
class KeptState:
    """A copy of the recurrent state after `position` tokens; `state` is empty once the copy is dropped. Copies are
    numbered in the order in which they were made."""

    number: int
    position: int
    state: bytes


class SlotSequence:
    """A sequence and its slot. `length` is the number of computed tokens, and `stored` the number of tokens in the
    slot. The sequence's next batch row computes the tokens from `first` on."""

    __slots__ = ("first", "kept", "length", "num_prompt", "slot", "stored", "tokens")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.tokens: list[int] = []
        self.num_prompt = 0
        self.length = self.stored = self.first = 0
        self.kept: list[KeptState] = []


class Slots:
    """The sequences of one llama.cpp context, by sequence id."""

    def __init__(self, memory: SlotObserver, num_ids: int, max_model_len: int) -> None:
        self._memory = memory
        self._num_ids, self._max_model_len = num_ids, max_model_len
        self.held: dict[int, SlotSequence] = {}
        self._num_kept = 0
        self.clear()

    def __getitem__(self, seq_id: int) -> SlotSequence:
        held = self.held.get(seq_id)
        if held is None:
            raise InternalError(f"no sequence with id {seq_id} is known")
        return held

    def __len__(self) -> int:
        return len(self.held)

    def clear(self) -> None:
        """Forget all sequences, after llama.cpp's memory was cleared."""
        self.held.clear()
        self._free = list(range(self._memory.num_slots - 1, -1, -1))

    def apply(self, plan: StepPlan) -> list[SlotSequence]:
        """Update the sequences according to a plan, and cut their slots to the valid tokens. Return the sequence of
        each batch row, in order."""
        _check_apart(plan)
        kin = {seq_id for fork in plan.forks for seq_id in (fork.parent, fork.child)}
        self.release(seq_id for seq_id in plan.freed if seq_id not in kin)  # their slots may be used by the forks
        for fork in plan.forks:
            self._fork(fork)
        self.release(seq_id for seq_id in plan.freed if seq_id in kin)
        return [self._update(row) for row in plan.rows]

    def adopt(self, seq_id: int, tokens: Sequence[int], restore: Callable[[int], bool]) -> bool:
        """Begin a sequence with `tokens`, whose KV the function `restore` writes into a slot. Return whether `restore`
        succeeded. Changes nothing if the sequence exists already or no slot is free."""
        if seq_id in self.held or not self._free:
            return False
        held = self._take(seq_id)
        if not restore(held.slot):
            self.release([seq_id])
            return False
        held.tokens = list(tokens)
        held.length = held.stored = held.num_prompt = len(tokens)
        return True

    def _take(self, seq_id: int) -> SlotSequence:
        if not self._free:
            raise OutOfBlocks(f"all {self._memory.num_slots} sequence slots of llama.cpp are in use")
        held = self.held[seq_id] = SlotSequence(self._free.pop())
        return held

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget the sequences; unknown ids are ignored."""
        for seq_id in seq_ids:
            held = self.held.pop(seq_id, None)
            if held is not None:
                self._memory.cut(held.slot, 0)
                self._free.append(held.slot)

    def _fork(self, fork: ForkRow) -> None:
        parent = self[fork.parent]
        if fork.child in self.held or fork.num_tokens > len(parent.tokens):
            raise InternalError(f"sequence {fork.parent} cannot be forked to {fork.child} at {fork.num_tokens} tokens")
        child = self._take(fork.child)
        child.tokens = parent.tokens[: fork.num_tokens]
        child.num_prompt = min(parent.num_prompt, fork.num_tokens)
        child.length = min(parent.length, fork.num_tokens)
        child.stored, child.kept = parent.stored, parent.kept.copy()
        self._memory.copy(parent.slot, child.slot, child.stored)
        self.rewind(child, child.length)

    def rewind(self, held: SlotSequence, length: int) -> int:
        """Cut a slot to at most `length` tokens; return the number of tokens that it then holds."""
        if held.stored > length and self._memory.is_recurrent:
            held.kept = [each for each in held.kept if each.position <= length and each.state]
            held.stored = held.kept[-1].position if held.kept else 0
            if held.kept:
                self._memory.restore(held.slot, held.kept[-1].state)
            self._memory.cut(held.slot, held.stored)
        elif held.stored > length:
            held.stored = length
            self._memory.cut(held.slot, length)
        return held.stored

    def _keep(self, held: SlotSequence, has_drafts: bool) -> None:
        """Store a copy of a sequence's recurrent state if its next tokens may be rolled back, or if the last copy is
        `_COPY_EVERY` tokens old."""
        last = held.kept[-1].position if held.kept else 0
        if held.stored > last and (has_drafts or held.stored - last >= _COPY_EVERY):
            self._num_kept += 1
            held.kept.append(KeptState(self._num_kept, held.stored, self._memory.state(held.slot)))
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop the oldest copies of states until the copies fit into `MAX_COPIES`."""
        every = {kept.number: kept for held in self.held.values() for kept in held.kept}
        size = sum(len(kept.state) for kept in every.values())
        for _, kept in sorted(every.items(), key=lambda each: each[0]):
            if size <= MAX_COPIES:
                break
            size -= len(kept.state)
            kept.state = b""

    def _update(self, row: PlanRow) -> SlotSequence:
        held = self.held.get(row.seq_id) or self._take(row.seq_id)
        end = row.start + row.num_scheduled
        if row.num_kept > len(held.tokens) or not 0 <= row.start <= min(held.length, row.num_kept):
            have = f"{len(held.tokens)} tokens, KV of {held.length}"
            raise InternalError(f"sequence {row.seq_id} has {have}; its row keeps {row.num_kept} from {row.start}")
        del held.tokens[row.num_kept :]
        held.tokens.extend(row.new_tokens)
        held.num_prompt = row.num_prompt
        if row.num_scheduled < 1 or not 0 <= row.num_logits <= row.num_scheduled:
            raise InternalError(f"sequence {row.seq_id} wants {row.num_logits} logits of {row.num_scheduled} tokens")
        if end > min(len(held.tokens), self._max_model_len):
            raise InternalError(f"the row of sequence {row.seq_id} ends at {end}, but it has {len(held.tokens)} tokens")
        if any(not 0 <= token < self._num_ids for token in row.new_tokens):
            raise InternalError(f"sequence {row.seq_id} gets a token id outside of 0 to {self._num_ids - 1}")
        held.first = self.rewind(held, row.start)
        if self._memory.is_recurrent:
            self._keep(held, row.num_logits > 1)
        held.length = held.stored = end
        return held

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)


def _check_apart(plan: StepPlan) -> None:
    ids = [row.seq_id for row in plan.rows]
    if len(set(ids)) != len(ids):
        raise InternalError(f"the plan of step {plan.step} has two rows of one sequence")
