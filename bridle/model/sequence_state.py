"""The executor's copy of one sequence: its tokens, its block table, and the contiguous runs of that table.

Only plans change the copy. Contiguous runs of blocks are tracked as the table grows and shrinks, because a kernel can
read the KV of a run as one view. This module uses no tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from bridle.engine.multimodal.multimodal_inputs import PlaceholderRange, Runs, before

Span = tuple[int, int]  # first slot, number of slots


@dataclass(slots=True, eq=False)
class BlockTableRow:
    """A sequence's row in the block table on a device, which step `last_step` was the last to use. The first `num_told`
    blocks of the sequence have been uploaded to the row."""

    number: int
    last_step: int
    num_told: int = 0


class CachedRequestState:
    """The executor's copy of one sequence: its tokens and block table. `num_prompt` is the number of prompt tokens, and
    `media` has the images among the tokens."""

    __slots__ = ("_runs", "blocks", "media", "num_prompt", "seat", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_prompt = 0
        self.media: Runs = ()
        self.blocks = array("i")
        self.seat: BlockTableRow | None = None  # the row of a device's block table for this sequence
        # (index in the table, block id) of the first block of each contiguous run
        self._runs: list[tuple[int, int]] = []

    def copy(self, num_tokens: int, num_blocks: int) -> CachedRequestState:
        """Return a copy cut to `num_tokens` tokens and `num_blocks` blocks, for a fork."""
        twin = CachedRequestState()
        twin.tokens = self.tokens[:num_tokens]
        twin.num_prompt = min(self.num_prompt, num_tokens)
        twin.media = before(self.media, num_tokens)
        twin.blocks = self.blocks[:]
        twin._runs = self._runs[:]
        twin.keep_blocks(num_blocks)
        return twin

    def keep_tokens(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]
        self.media = before(self.media, num_tokens)

    def seen(self, start: int, end: int) -> list[PlaceholderRange]:
        """Return the images that overlap tokens `start` to `end` (exclusive)."""
        return [run for run in self.media if run.position < end and run.end > start]

    def keep_blocks(self, num_blocks: int) -> None:
        """Truncate the block table to its first `num_blocks` blocks."""
        if num_blocks >= len(self.blocks):
            return
        del self.blocks[num_blocks:]
        if self.seat is not None:
            self.seat.num_told = min(self.seat.num_told, num_blocks)
        while self._runs and self._runs[-1][0] >= num_blocks:
            self._runs.pop()

    def add_blocks(self, blocks: Iterable[int]) -> None:
        """Append blocks to the block table."""
        for block in blocks:
            if not self.blocks or block != self.blocks[-1] + 1:
                self._runs.append((len(self.blocks), block))
            self.blocks.append(block)

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    def spans(self, start: int, end: int, block_size: int) -> list[Span]:
        """Return the slots of positions `start` to `end` (exclusive), in order, as contiguous spans."""
        runs = self._runs
        if len(runs) == 1:
            return [(runs[0][1] * block_size + start, end - start)]
        spans = []
        for number, (index, block) in enumerate(runs):
            last = runs[number + 1][0] if number + 1 < len(runs) else len(self.blocks)
            low, high = max(start, index * block_size), min(end, last * block_size)
            if low < high:
                spans.append(((block - index) * block_size + low, high - low))
        return spans
