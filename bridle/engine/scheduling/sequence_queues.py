"""Queues of running and waiting sequences: sequences are added, admitted while blocks are free, and removed.

If no block is free, a sequence that holds blocks alone is preempted and computed later: one that waits for its
controller, else the newest. Forks and freed sequences are recorded; the next plan reports them to the executor.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Literal

from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.kv.stored_blocks import StoredBlocks
from bridle.engine.kv.stored_sequences import StoredSequences
from bridle.engine.multimodal.encoder_scheduler import EncoderScheduler
from bridle.engine.multimodal.multimodal_inputs import align_to_item
from bridle.engine.scheduling.step_plan import ForkRow
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus
from bridle.engine.spec_decode.speculation import Speculation


class SequenceQueues:
    """The sequences that hold blocks, and the sequences that wait for blocks."""

    def __init__(
        self,
        blocks: BlockManager,
        kv: Literal["paged", "sequences"],
        clock: Callable[[], float],
        media: EncoderScheduler,
        speculation: Speculation,
    ) -> None:
        self.blocks, self.media, self.speculation = blocks, media, speculation
        self.stored: StoredBlocks | None = None  # the store below the prefix cache, if there is one
        self.sequences: StoredSequences | None = None  # the store of a backend that keeps KV by sequence
        self._clock = clock
        self._by_sequence = kv == "sequences"
        self.running: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []  # ordered by urgency
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache
        self._suspects: set[int] = set()  # sequences of a failed step
        self._forks: list[ForkRow] = []
        self._freed: list[int] = []
        self._in_order = True  # whether `running` goes from most to least urgent

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that holds no blocks."""
        seq.queue.status = SequenceStatus.WAITING
        if seq.queue.queued_at is None:
            seq.queue.queued_at = self._clock()
            if seq.sampling.speculate or seq.sampling.prediction_ids:
                self.speculation.on_sequence_added(seq)
        insort(self.waiting, seq, key=urgency)

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """Run `child`, which was just forked from the running sequence `parent`. The two sequences share blocks, and
        the next plan reports the fork to the executor."""
        self.blocks.fork(parent, child)
        self.blocks.truncate(child)  # the parent may hold blocks for draft tokens
        child.kv.num_mirrored_tokens = min(parent.kv.num_mirrored_tokens, len(child.tokens))
        child.kv.num_mirrored_blocks = min(parent.kv.num_mirrored_blocks, len(child.kv.block_table))
        self._forks.append(ForkRow(parent.id, child.id, child.kv.num_mirrored_tokens, child.kv.num_mirrored_blocks))
        self.running[child.id] = child
        self._in_order = False

    def remove(self, seq: Sequence, parks: bool = False) -> None:
        """Remove a sequence that has ended. The blocks of the sequence are free at once. With `parks`, the KV of the
        free blocks is protected from eviction."""
        if parks:
            self.blocks.park(seq, self._clock())
        if seq.request.retains and not seq.index:
            self.blocks.retain(seq, self._clock())
        if seq.queue.status is SequenceStatus.RUNNING:
            del self.running[seq.id]
            if self.sequences is not None:
                self.sequences.end(seq)
        elif seq.queue.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self.blocks.free(seq)
        if self.speculation.is_used:  # otherwise the speculation has no state of the sequence
            self.speculation.guessing.forget(seq)
        self._suspects.discard(seq.id)
        self.media.crowded_out.discard(seq.id)
        self._freed.append(seq.id)
        seq.queue.status = SequenceStatus.FINISHED

    def on_rewind(self, seq: Sequence) -> None:
        """Free the blocks past the end of a sequence whose tokens were rolled back.

        A backend that keeps KV by sequence frees the KV only with the next row of the sequence. So the blocks still
        count as used until that next row.
        """
        if not self._by_sequence:
            self.blocks.truncate(seq)
        self.speculation.guessing.cut(seq)

    def _admit(self, seq: Sequence, num_kept: int = 0) -> bool:
        """Admit a waiting sequence if the free blocks hold all of its tokens and leave `num_kept` blocks."""
        if not self.blocks.admit(seq, num_kept):
            return False
        seq.queue.num_passes = 0
        seq.queue.status, seq.kv.is_prefilling = SequenceStatus.RUNNING, True
        if seq.queue.seconds is None and seq.queue.queued_at is not None:
            seq.queue.seconds = self._clock() - seq.queue.queued_at
        was_computed = seq.output.prompt_sent or seq.kv.num_mirrored_tokens
        if self.sequences is not None:
            self._restore(seq, self.sequences)
        if not was_computed:
            num_cached = min(seq.kv.num_computed, seq.num_prompt)
            self.num_cached_tokens += num_cached - seq.kv.num_cached
            seq.kv.num_cached = num_cached
        if self.running and urgency(next(reversed(self.running.values()))) > urgency(seq):
            self._in_order = False
        self.running[seq.id] = seq
        return True

    def _restore(self, seq: Sequence, sequences: StoredSequences) -> None:
        """Let an admitted sequence begin with KV from the store, if the store has any. Before the sequence begins, the
        backend deletes ended sequences, unless `seq` was forked in this step."""
        kin = {seq_id for fork in self._forks for seq_id in (fork.parent, fork.child)}
        sequences.free([seq_id for seq_id in self._freed if seq_id not in kin])
        self._freed = [seq_id for seq_id in self._freed if seq_id in kin]
        if length := sequences.begin(seq):
            self.blocks.allocate(seq, length)
            seq.kv.num_computed = seq.kv.num_mirrored_tokens = length

    def _raise_to(self, level: int, seq: Sequence) -> None:
        """Give an admitted sequence the urgency of the most urgent sequence that it overtook."""
        seq.queue.level = level
        self._in_order = False

    # -- making room -------------------------------------------------------------------------------------

    def _make_room(self, seq: Sequence, num_tokens: int, picked: Iterable[int]) -> int:
        """Preempt other sequences until `num_tokens` tokens of `seq`, or at least some of them, have blocks. Returns
        the number of tokens that have blocks."""
        while True:
            missing = self.blocks.num_needed(seq, seq.kv.num_computed + num_tokens) - self.blocks.num_free
            if missing <= 0 and self.blocks.has_state_for(seq):
                return num_tokens
            victim = self._victim(seq, picked)
            if victim is None:
                return self._shorten(seq, num_tokens)
            self.preempt(victim)

    def _shorten(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens fit into the free blocks; 0 without a slot for the recurrent state."""
        if not self.blocks.has_state_for(seq):
            return 0
        while num_tokens and self.blocks.num_needed(seq, seq.kv.num_computed + num_tokens) > self.blocks.num_free:
            num_tokens = ((seq.kv.num_computed + num_tokens - 1) // self.blocks.block_size) * self.blocks.block_size
            num_tokens = max(num_tokens - seq.kv.num_computed, 0)
        whole = align_to_item(seq.runs, seq.kv.num_computed, seq.kv.num_computed + num_tokens) - seq.kv.num_computed
        return whole if whole <= num_tokens else 0

    def _victim(self, seq: Sequence, picked: Iterable[int]) -> Sequence | None:
        """Return the sequence to preempt for `seq`. The preemption of that sequence must free a block. Sequences that
        wait for their controllers come first, then the newest ones."""
        taken = set(picked)
        others = [s for s in self.running.values() if s is not seq and s.id not in taken]
        if not others:
            return None
        return max(others, key=lambda s: (self.blocks.num_exclusive(s) > 0, s.is_held, urgency(s)))

    def preempt(self, seq: Sequence) -> None:
        """Release a running sequence's blocks. The sequence waits and is computed again later, mostly from the prefix
        cache."""
        del self.running[seq.id]
        self.blocks.free(seq)
        if self.speculation.is_used:  # otherwise the speculation has no state of the sequence
            self.speculation.guessing.forget(seq)
        self.media.crowded_out.discard(seq.id)
        seq.kv.forget()
        if self._by_sequence:
            seq.forget_mirror()
            self._freed.append(seq.id)
        self.add(seq)
        self.num_preemptions += 1

    def reset(self, suspects: Iterable[Sequence] = ()) -> None:
        """Move all running sequences to the waiting ones, because the executor lost its state. Each sequence is sent to
        the executor again.

        The sequences of `suspects` are then computed one at a time, until each has passed a step.
        """
        for seq in list(self.running.values()):
            self.preempt(seq)
        for seq in self.waiting:
            seq.forget_mirror()
        self.blocks.forget_content()
        if self.stored is not None:
            self.stored.forget_content()
        self._forks, self._freed = [], []
        self._suspects = {seq.id for seq in suspects if not seq.is_finished}


def urgency(seq: Sequence) -> tuple[int, float, int]:
    """Return the sort key of sequences. Sequences with smaller keys run first."""
    return seq.queue.level, seq.request.place, seq.id
