"""Stores the simulated KV of the scripted executor, by block or by sequence.

Both kinds of storage keep a (token, digest) pair for each position. The storages return exactly what was written, right
or wrong; the executor checks the content. `PagedKV` stores by slot (`block * block_size + offset`). `SequenceKV` stores
by sequence id. `SequenceKV` counts cells like a backend with a unified cache, where a fork shares cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bridle.engine.scheduling.step_plan import BlockCopy, PlanRow, StateCopy
from bridle.errors import InternalError
from bridle.testing.logits import Digests, Tokens


class Contents(NamedTuple):
    """The content of positions 0 to n-1 of a sequence: token ids [n] and digests [n]."""

    tokens: Tokens
    digests: Digests


class PagedKV:
    """A pool of slots. The block tables in the plan give the slot of each position."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Forget all contents. A slot that was not written has token -1."""
        self._tokens: Tokens = np.full(self.num_blocks * self.block_size, -1, dtype=np.int64)
        self._digests: Digests = np.zeros(self.num_blocks * self.block_size, dtype=np.uint64)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks. All sources are read before any target is written."""
        if not copies:
            return
        sources = self._blocks([copy.source for copy in copies])
        targets = self._blocks([copy.target for copy in copies])
        self._tokens[targets] = self._tokens[sources]
        self._digests[targets] = self._digests[sources]

    def write(self, table: Sequence[int], start: int, tokens: Sequence[int], digests: Sequence[int]) -> None:
        """Fill the slots of the positions from `start` on."""
        slots = self.slots(table, start + len(tokens))[start:]
        self._tokens[slots] = tokens
        self._digests[slots] = np.array(digests, dtype=np.uint64)

    def read(self, table: Sequence[int], length: int) -> Contents:
        """Return the contents of the slots of positions 0 to `length - 1`."""
        slots = self.slots(table, length)
        return Contents(self._tokens[slots], self._digests[slots])

    def slots(self, table: Sequence[int], length: int) -> Tokens:
        """Return the slots of the first `length` positions: position p is in slot `table[p // B] * B + p % B`."""
        return self._blocks(table)[:length]

    def read_block(self, block: int) -> bytes:
        """Return a block as bytes: its tokens, then its digests."""
        slots = self._blocks([block])
        return self._tokens[slots].tobytes() + self._digests[slots].tobytes()

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block with bytes that `read_block` returned."""
        slots = self._blocks([block])
        self._tokens[slots], self._digests[slots] = np.frombuffer(data, np.int64).reshape(2, -1)

    def _blocks(self, blocks: Sequence[int]) -> Tokens:
        firsts = np.array(blocks, dtype=np.int64) * self.block_size  # [n]
        return np.ravel(firsts[:, None] + np.arange(self.block_size))  # [n * B]


class FakeStates:
    """Slots for recurrent states. A state is the digest of all tokens that went into it. So a truncation of the
    sequence cannot undo a state."""

    def __init__(self, num_slots: int) -> None:
        self._digests: list[int | None] = [None] * num_slots

    def __len__(self) -> int:
        return len(self._digests)

    def clear(self) -> None:
        """Forget all states."""
        self._digests = [None] * len(self._digests)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states. All sources are read before any target is written."""
        held = [self._digests[copy.source] for copy in copies]
        for copy, digest in zip(copies, held, strict=True):
            self._digests[copy.target] = digest

    def read(self, slot: int) -> bytes:
        """Return the bytes of a recurrent state. Raises `InternalError` if the slot was never written."""
        digest = self._digests[slot]
        if digest is None:
            raise InternalError(f"state slot {slot} is read, but is empty")
        return digest.to_bytes(8, "little")

    def write(self, slot: int, data: memoryview) -> None:
        """Fill a state's slot with bytes that `read` returned."""
        self._digests[slot] = int.from_bytes(data, "little")

    def run(self, row: PlanRow, digests: Sequence[int]) -> None:
        """Advance the state of a row from its first to its last token. `digests` has the digests of all tokens of the
        row's sequence."""
        end = row.start + row.num_scheduled
        if row.start and self._digests[row.state] != digests[row.start - 1]:
            raise InternalError(
                f"sequence {row.seq_id} continues at {row.start}, but slot {row.state} holds another state"
            )
        for save in row.saves:
            if not row.start < save.position <= end:
                raise InternalError(f"sequence {row.seq_id} saves its state at {save.position}, outside of its tokens")
            self._digests[save.slot] = digests[save.position - 1]
        self._digests[row.state] = digests[end - 1]


class SequenceKV:
    """The cells of each sequence, by sequence id. `capacity` limits the number of different cells in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget all cells."""
        self._cells: dict[int, list[int]] = {}
        self._contents: dict[int, tuple[int, int]] = {}
        self._references: Counter[int] = Counter()
        self._next_cell = 0

    def length(self, seq_id: int) -> int:
        """Return the number of positions that are stored for a sequence."""
        return len(self._cells.get(seq_id, ()))

    @property
    def num_cells(self) -> int:
        """Return the number of different cells in use. Shared cells count once."""
        return len(self._contents)

    def fork(self, parent: int, child: int, length: int) -> None:
        """Let `child` share the first `length` cells of `parent`."""
        cells = self._cells.get(parent, [])[:length]
        self._cells[child] = cells
        self._references.update(cells)

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop the cells of the positions from `length` on."""
        cells = self._cells.setdefault(seq_id, [])
        for cell in cells[length:]:
            self._references[cell] -= 1
            if not self._references[cell]:
                del self._references[cell], self._contents[cell]
        del cells[length:]

    def free(self, seq_id: int) -> None:
        """Drop all cells of a sequence."""
        self.truncate(seq_id, 0)
        self._cells.pop(seq_id, None)

    def append(self, seq_id: int, tokens: Sequence[int], digests: Sequence[int]) -> None:
        """Add a cell for each token. If the capacity is exceeded, raise `InternalError`, because the engine has counted
        wrongly."""
        cells = self._cells.setdefault(seq_id, [])
        for content in zip(tokens, digests, strict=True):
            cells.append(self._next_cell)
            self._contents[self._next_cell] = content
            self._references[self._next_cell] = 1
            self._next_cell += 1
        if self.num_cells > self.capacity:
            raise InternalError(f"{self.num_cells} KV cells are in use; the capacity is {self.capacity}")

    def read(self, seq_id: int, length: int) -> Contents:
        """Return the contents of the first `length` positions of a sequence."""
        pairs = [self._contents[cell] for cell in self._cells[seq_id][:length]]
        tokens = np.array([token for token, _ in pairs], dtype=np.int64)
        return Contents(tokens, np.array([digest for _, digest in pairs], dtype=np.uint64))
