"""Pool of free KV blocks; it decides which block is allocated next. The choice of a block has two goals. KV that may be
reused (full, hashed blocks of finished sequences) should stay cached as long as possible. The blocks of a sequence
should be adjacent, because a backend can then read its KV as one slice instead of gathering it. So when a sequence
takes its first block, the blocks after it are *reserved* for that sequence. A reservation is only a hint: any sequence
may take a reserved block when no other block is free. This module uses no sequences, tokens or hashes: it gets owners
and blocks as numbers."""

from __future__ import annotations

from collections import OrderedDict

from bridle.errors import InternalError

_OPEN, _CLOSED = 0, 1


class FreeBlocks:
    """Free KV blocks with the numbers `0 .. num_blocks-1`; all of them are free at first.

    A free block is *plain* (its KV cannot be reused), *cached*, or *parked* (its KV is retained). A cached block may be
    reused until it is evicted. The oldest cached block is evicted first. A block with retained KV is also cached, but
    is not evicted until its owner releases it. Plain blocks may be reserved for one owner.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._state = bytearray(num_blocks)  # _OPEN: plain and not reserved
        self._reserved: dict[int, int] = {}  # plain block -> owner
        self._reservations: dict[int, list[int]] = {}  # owner -> blocks; others may have taken some of them
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._parked: set[int] = set()
        self._num_plain = num_blocks

    def __len__(self) -> int:
        return self._num_plain + len(self._cached) + len(self._parked)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks whose KV may still be reused, including blocks with retained KV."""
        return len(self._cached) + len(self._parked)

    @property
    def has_only_parked(self) -> bool:
        """Return whether all free blocks have retained KV."""
        return not self._num_plain and not self._cached

    def allocate(self, owner: int, after: int | None, num_expected: int) -> tuple[int, list[int]]:
        """Allocate one block for `owner`, next to block `after` if possible. Returns the block, and the cached blocks
        that were evicted for it.

        `num_expected` is the number of blocks that the owner will probably need from now on, including this one.
        """
        if after is not None and after + 1 < self.num_blocks:
            beside = after + 1
            if self._state[beside] == _OPEN or self._reserved.get(beside) == owner:
                self._claim(beside)
                return beside, []
        block = self._allocate_run(owner, max(num_expected, 1))
        if block is not None:
            return block, []
        if self._reserved:
            block = next(reversed(self._reserved))
            self._claim(block)
            return block, []
        if self._cached:
            return self._evict_run(owner, max(num_expected, 1))
        raise InternalError("no KV block is free; the caller must check the number of free blocks before allocation")

    def free_plain(self, block: int) -> None:
        """Free `block`. The block's KV cannot be reused."""
        self._state[block] = _OPEN
        self._num_plain += 1

    def free_cached(self, block: int) -> None:
        """Free `block`. The block's KV may be reused. All blocks that are cached now are evicted before this block."""
        self._cached[block] = None

    def free_parked(self, block: int) -> None:
        """Free `block`, but retain its KV: the block is protected from eviction."""
        self._parked.add(block)

    def park(self, block: int) -> None:
        """Protect a cached block from eviction."""
        del self._cached[block]
        self._parked.add(block)

    def unpark(self, block: int) -> None:
        """Turn a block with retained KV into a cached block. All blocks that are cached now are evicted before this
        block."""
        self._parked.remove(block)
        self._cached[block] = None

    def revive(self, block: int) -> None:
        """Take a cached block back into use together with its KV."""
        if block in self._parked:
            self._parked.remove(block)
        else:
            del self._cached[block]

    def forget(self, block: int) -> None:
        """Turn a cached block into a plain block, because its KV cannot be reused any more."""
        self.revive(block)
        self.free_plain(block)

    def release_reservation(self, owner: int) -> None:
        """Drop the reservation of `owner`, because it needs no more blocks."""
        for block in self._reservations.pop(owner, ()):
            if self._reserved.get(block) == owner:
                del self._reserved[block]
                self._state[block] = _OPEN

    def free_ids(self) -> set[int]:
        """Return all free blocks, for integrity checks."""
        plain = {block for block, state in enumerate(self._state) if state == _OPEN}
        return plain | set(self._reserved) | set(self._cached) | self._parked

    def newest(self) -> list[int]:
        """Return the blocks whose KV may be reused. The block that would be evicted last comes first."""
        return [*self._parked, *reversed(self._cached)]

    def parked_ids(self) -> set[int]:
        """Return the blocks with retained KV, for integrity checks."""
        return set(self._parked)

    def _claim(self, block: int) -> None:
        self._reserved.pop(block, None)
        self._state[block] = _CLOSED
        self._num_plain -= 1

    def _allocate_run(self, owner: int, length: int) -> int | None:
        """Return the first of `length` adjacent free blocks, or of fewer if there are not as many. Reserve the
        others."""
        length = min(length, self._num_plain)
        while length:
            start = self._state.find(bytes(length))
            if start >= 0:
                self._claim(start)
                self._reserve(owner, range(start + 1, start + length))
                return start
            length //= 2
        return None

    def _reserve(self, owner: int, blocks: range) -> None:
        for block in blocks:
            self._state[block] = _CLOSED
            self._reserved[block] = owner
        self._reservations.setdefault(owner, []).extend(blocks)

    def _evict_run(self, owner: int, length: int) -> tuple[int, list[int]]:
        """Evict the oldest cached block, and the blocks just below it (with lower numbers). A finished sequence frees
        its last block first. So the oldest cached block of a sequence has the highest number."""
        last = next(iter(self._cached))
        first = last
        while last - first + 1 < length and first - 1 in self._cached:
            first -= 1
        evicted = list(range(first, last + 1))
        for block in evicted:
            del self._cached[block]
            self._state[block] = _CLOSED
        self._num_plain += len(evicted) - 1
        self._reserve(owner, range(first + 1, last + 1))
        return first, evicted
