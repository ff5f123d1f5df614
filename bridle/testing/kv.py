"""Storage of the scripted executor's simulated keys and values: by block, or by sequence.

Both keep a (token, digest) pair for each position and return exactly what was written, right or wrong; `mirror.py`
judges it. `PagedKV` knows only slots (`block * block_size + offset`). `SequenceKV` knows only sequence ids, and counts
cells as a backend with a unified cache would: a fork shares them.
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
    """Content of positions 0 to n-1 of a sequence: token ids [n] and digests [n]."""

    tokens: Tokens
    digests: Digests


class PagedKV:
    """A pool of slots, addressed through block tables that come from the plan."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Forget everything; unwritten slots hold token -1."""
        self._tokens: Tokens = np.full(self.num_blocks * self.block_size, -1, dtype=np.int64)
        self._digests: Digests = np.zeros(self.num_blocks * self.block_size, dtype=np.uint64)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all sources being read before any target is written."""
        sources = self._blocks([copy.source for copy in copies])
        targets = self._blocks([copy.target for copy in copies])
        self._tokens[targets] = self._tokens[sources]
        self._digests[targets] = self._digests[sources]

    def write(self, table: Sequence[int], start: int, tokens: Sequence[int], digests: Sequence[int]) -> None:
        """Fill the slots of positions `start` and following."""
        slots = self.slots(table, start + len(tokens))[start:]
        self._tokens[slots] = tokens
        self._digests[slots] = np.array(digests, dtype=np.uint64)

    def read(self, table: Sequence[int], length: int) -> Contents:
        """The contents of the slots of positions 0 to `length - 1`."""
        slots = self.slots(table, length)
        return Contents(self._tokens[slots], self._digests[slots])

    def slots(self, table: Sequence[int], length: int) -> Tokens:
        """Slot of each of the first `length` positions: position p lies at `table[p // B] * B + p % B`."""
        return self._blocks(table)[:length]

    def read_block(self, block: int) -> bytes:
        """The bytes of a block: its tokens, then its digests."""
        slots = self._blocks([block])
        return self._tokens[slots].tobytes() + self._digests[slots].tobytes()

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block with bytes that `read_block` has returned."""
        slots = self._blocks([block])
        self._tokens[slots], self._digests[slots] = np.frombuffer(data, np.int64).reshape(2, -1)

    def _blocks(self, blocks: Sequence[int]) -> Tokens:
        firsts = np.array(blocks, dtype=np.int64) * self.block_size  # [n]
        return np.ravel(firsts[:, None] + np.arange(self.block_size))  # [n * B]


class FakeStates:
    """Slots of recurrent states. A state is the digest of all tokens that went into it, which no cut can undo."""

    def __init__(self, num_slots: int) -> None:
        self._digests: list[int | None] = [None] * num_slots

    def __len__(self) -> int:
        return len(self._digests)

    def clear(self) -> None:
        """Forget everything."""
        self._digests = [None] * len(self._digests)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states, all sources being read before any target is written."""
        held = [self._digests[copy.source] for copy in copies]
        for copy, digest in zip(copies, held, strict=True):
            self._digests[copy.target] = digest

    def read(self, slot: int) -> bytes:
        """The bytes of a state. Raises `InternalError` if nothing has written it."""
        digest = self._digests[slot]
        if digest is None:
            raise InternalError(f"state slot {slot} is read, and holds nothing")
        return digest.to_bytes(8, "little")

    def write(self, slot: int, data: memoryview) -> None:
        """Fill a slot with data that `read` has returned."""
        self._digests[slot] = int.from_bytes(data, "little")

    def run(self, row: PlanRow, digests: Sequence[int]) -> None:
        """Bring a row's state from its first to its last token. `digests` are those of all tokens of its sequence."""
        end = row.start + row.num_scheduled
        if row.start and self._digests[row.state] != digests[row.start - 1]:
            raise InternalError(
                f"sequence {row.seq_id} continues at {row.start} from another state, in slot {row.state}"
            )
        for save in row.saves:
            if not row.start < save.position <= end:
                raise InternalError(f"sequence {row.seq_id} saves its state at {save.position}, outside of its row")
            self._digests[save.slot] = digests[save.position - 1]
        self._digests[row.state] = digests[end - 1]


class SequenceKV:
    """Cells by sequence id. `capacity` bounds the number of distinct live cells."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._cells: dict[int, list[int]] = {}
        self._contents: dict[int, tuple[int, int]] = {}
        self._references: Counter[int] = Counter()
        self._next_cell = 0

    def length(self, seq_id: int) -> int:
        """Number of positions kept for a sequence."""
        return len(self._cells.get(seq_id, ()))

    @property
    def num_cells(self) -> int:
        """Distinct cells in use, shared ones counted once."""
        return len(self._contents)

    def fork(self, parent: int, child: int, length: int) -> None:
        """`child` shares the first `length` cells of `parent`."""
        cells = self._cells.get(parent, [])[:length]
        self._cells[child] = cells
        self._references.update(cells)

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop the cells of positions `length` and following."""
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
        """Add a cell for each token; too many cells in all is the engine's counting error."""
        cells = self._cells.setdefault(seq_id, [])
        for content in zip(tokens, digests, strict=True):
            cells.append(self._next_cell)
            self._contents[self._next_cell] = content
            self._references[self._next_cell] = 1
            self._next_cell += 1
        if self.num_cells > self.capacity:
            raise InternalError(f"{self.num_cells} KV cells are in use; the capacity is {self.capacity}")

    def read(self, seq_id: int, length: int) -> Contents:
        """The contents of the first `length` positions of a sequence."""
        pairs = [self._contents[cell] for cell in self._cells[seq_id][:length]]
        tokens = np.array([token for token, _ in pairs], dtype=np.int64)
        return Contents(tokens, np.array([digest for _, digest in pairs], dtype=np.uint64))
