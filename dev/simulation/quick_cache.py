"""A model of the prefix cache (`BlockManager`) that counts the cached blocks of each chat instead of tracking every
block.

Two chats share only their system prompt. So two kinds of numbers describe the cache: the leading blocks of each system
prompt, and the blocks of each chat after its system prompt. These block ranges are called *parts*. As in the real
cache, blocks that sequences use are not evicted. Unused blocks are evicted in the order of their last use, and the end
of a part before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

Chain = tuple[tuple[Hashable, int], ...]  # parts in order, each with a number of whole blocks


@dataclass(slots=True)
class _Part:
    """The cached blocks of one part, and the number of sequences that use them."""

    num_blocks: int = 0
    num_users: int = 0


@dataclass(slots=True)
class Hold:
    """The blocks that one sequence uses: the parts in `chain`, and `num_own` blocks that belong to no part yet.
    `num_found` blocks were already cached when the sequence began."""

    chain: Chain
    num_own: int
    num_found: int


class QuickCache:
    """A prefix cache with a capacity of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_held = 0  # by sequences
        self.num_kept = 0  # blocks of parts without users
        self._parts: dict[Hashable, _Part] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()  # parts without users, oldest first

    def num_found(self, chain: Chain) -> int:
        """Return the number of cached blocks at the beginning of a chain of parts."""
        total = 0
        for key, length in chain:
            part = self._parts.get(key)
            if part is None:
                break
            total += min(part.num_blocks, length)
            if part.num_blocks < length:
                break
        return total

    def has_room(self, chain: Chain, num_blocks: int) -> bool:
        """Return whether a sequence of `num_blocks` blocks fits besides the blocks in use, if it begins with
        the chain."""
        idle = sum(self._parts[key].num_blocks for key, _ in chain if key in self._idle)
        return self.num_held + idle + num_blocks - self.num_found(chain) <= self.num_blocks

    def take(self, chain: Chain, num_blocks: int) -> Hold:
        """Begin a sequence of `num_blocks` blocks."""
        found = self.num_found(chain)
        for key, _ in chain:
            part = self._parts.setdefault(key, _Part())
            if key in self._idle:
                del self._idle[key]
                self.num_kept -= part.num_blocks
                self.num_held += part.num_blocks
            part.num_users += 1
        self.num_held += num_blocks - found
        self._evict()
        return Hold(chain, num_blocks - found, found)

    def fill(self, hold: Hold, chain: Chain) -> None:
        """Record that the sequence has computed all blocks of the chain; they are cached from now on."""
        for key, length in chain:
            part = self._parts[key]
            fresh = min(max(length - part.num_blocks, 0), hold.num_own)
            part.num_blocks += fresh
            hold.num_own -= fresh

    def release(self, hold: Hold) -> None:
        """End the sequence; its cached blocks stay until they are evicted."""
        self.num_held -= hold.num_own
        for key, _ in reversed(hold.chain):
            part = self._parts[key]
            part.num_users -= 1
            if part.num_users == 0:
                self.num_held -= part.num_blocks
                self.num_kept += part.num_blocks
                self._idle[key] = None

    def _evict(self) -> None:
        excess = self.num_held + self.num_kept - self.num_blocks
        while excess > 0 and self._idle:
            key = next(iter(self._idle))
            part = self._parts[key]
            count = min(excess, part.num_blocks)
            part.num_blocks -= count
            self.num_kept -= count
            excess -= count
            if not part.num_blocks:
                del self._idle[key], self._parts[key]
