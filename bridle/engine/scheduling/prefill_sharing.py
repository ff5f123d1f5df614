"""Divides a step's budget of prompt tokens among the prompts that need it.

Up to half of the budget goes to the prompts with the fewest tokens left to compute. The other half of the budget is
given in order of urgency. So a short prompt does not wait for an earlier long prompt. The first prompt in line loses at
most half of the budget. Lengths are compared as powers of two. So prompts of similar length keep their order of
urgency, and users keep their turns. A prompt of a more urgent level always comes first.

A short prompt may be admitted before a longer prompt that waits for room in the KV cache. At most `MAX_PASSES` shorter
prompts may overtake a prompt that waits for room.

If several prompts have the same beginning, one of the prompts computes the beginning. The other prompts wait, and then
find the beginning in the prefix cache. A prompt for which other prompts wait counts as a short prompt.

 This module allocates no blocks and admits no sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus

#: Maximum number of prompts that may take room before another prompt that waits for it.
MAX_PASSES = 64
#: Maximum number of waiting prompts whose cached part is looked up. Other prompts count with their whole length, and
#: only if it is at most two steps.
_MAX_MATCHED = 64

_Wish = tuple[Sequence, int]  # a sequence, and the number of tokens that it needs


class PromptShares:
    """The prompts that are being computed in one step. Call `begin` first in each step."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._begun: dict[bytes, list[Sequence]] = {}  # by the hash of their first block
        #: Blocks that running prompts will still allocate.
        self.num_owed = 0

    def begin(self, running: Iterable[Sequence]) -> None:
        """Record which prompts are being computed, except those that wait for their controllers."""
        self._begun, self.num_owed = {}, 0
        for seq in running:
            if seq.kv.is_prefilling and not seq.is_held:
                self.add(seq)

    def add(self, seq: Sequence) -> None:
        """Record another prompt that is being computed."""
        self.num_owed += self._blocks.blocks_for(len(seq.tokens)) - len(seq.kv.block_table)
        if seq.kv.block_hashes:
            self._begun.setdefault(seq.kv.block_hashes[0], []).append(seq)

    def provider(self, seq: Sequence) -> Sequence | None:
        """Return the prompt that computes the next uncached block of the waiting sequence `seq`, or None."""
        number = self._blocks.missing_block(seq)
        if number is None or seq.kv.block_hashes[0] not in self._begun:
            return None
        missing, start = seq.kv.block_hashes[number : number + 1], number * self._blocks.block_size
        for other in self._begun[seq.kv.block_hashes[0]]:
            kv = other.kv
            if kv.block_hashes[number : number + 1] == missing and kv.num_computed <= start and other.is_ready:
                return other
        return None

    def split(self, budget: int, begun: list[_Wish], order: list[Sequence]) -> dict[int, int]:
        """Return how much of the budget is reserved for each sequence id: in total up to half of the budget, for the
        shortest prompts first.

        `begun` has the running sequences with the number of tokens that each needs. `order` has the waiting sequences
        in order of admission.
        """
        left, shares = budget // 2, dict[int, int]()
        room = _Room(self._blocks, self.num_owed, next((seq for seq in order if seq.is_ready), None))
        claimed: set[bytes] = set()  # blocks that waiting sequences will compute
        for seq, num_tokens in sorted(begun + self._waiting(2 * budget, order), key=_shortness):
            if left <= 0:
                break
            if seq.queue.status is SequenceStatus.WAITING:
                provider = self.provider(seq)
                if provider is None and not (self._claim(seq, claimed) and room.take(seq)):
                    continue
                seq = provider or seq
            num_tokens = min(num_tokens, left)
            shares[seq.id] = shares.get(seq.id, 0) + num_tokens
            left -= num_tokens
        return shares

    def _claim(self, seq: Sequence, claimed: set[bytes]) -> bool:
        """Record that the waiting sequence `seq` will compute its next block. Returns False if another sequence already
        computes that block."""
        number = self._blocks.missing_block(seq)
        if number is None:
            return True
        digest = seq.kv.block_hashes[number]
        is_new = digest not in claimed
        claimed.add(digest)
        return is_new

    def _waiting(self, most: int, order: list[Sequence]) -> list[_Wish]:
        """Return the waiting sequences that may be short, each with the number of its tokens that are not cached."""
        looked_up = [seq for seq in order[:_MAX_MATCHED] if seq.is_ready]
        wishes = [(seq, seq.target - self._blocks.match_prefix(seq)) for seq in looked_up]
        others = order[_MAX_MATCHED:]
        return wishes + [(seq, seq.target) for seq in others if len(seq.tokens) <= most and seq.is_ready]


class _Room:
    """The free blocks of a step. Some free blocks are reserved for `head`, the first waiting sequence."""

    def __init__(self, blocks: BlockManager, num_owed: int, head: Sequence | None) -> None:
        self._blocks = blocks
        self._head = head
        self._left = blocks.num_free - num_owed
        self._kept = 0 if head is None else blocks.num_missing(head)

    def take(self, seq: Sequence) -> bool:
        """Reserve blocks for all tokens of `seq`. Returns whether there were enough free blocks."""
        need = self._blocks.num_missing(seq)
        if need > self._left:
            return False
        head = self._head
        if seq is head:
            self._kept = 0
        elif head is not None and need > self._left - self._kept:
            if head.queue.num_passes >= MAX_PASSES or seq.queue.level > head.queue.level:
                return False
            head.queue.num_passes += 1
        self._left -= need
        return True


def _shortness(wish: _Wish) -> tuple[int, int, float, int]:
    """Return the sort key of a prompt: by level, then by size class, then by urgency."""
    seq, num_tokens = wish
    return seq.queue.level, num_tokens.bit_length(), seq.request.place, seq.id
