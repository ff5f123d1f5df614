"""KV blocks of all sequences. Blocks are shared by reference counts, found by chained hashes, and copied on write.

Position p of a sequence is in slot `block_table[p // B] * B + p % B`. These rules hold at all times:

1. A block is written only if exactly one sequence refers to it and it has no hash. Before a write, a shared block is
copied, and a block with a hash loses its hash.
2. A block has a hash only if it is full and its KV was computed.
3. Every block is either free or referenced. Free blocks with a hash are the prefix cache. Blocks with retained KV are
evicted after all others (`KVRetention`).

The hash of a full block covers all tokens up to the block's end, with their images and control vectors. A hash is
blake2b over the parent's hash, the token ids, and marks of images and control vectors. A chain of hashes starts at the
hash of (model, adapter, tenant). Hashes have 128 bits and cannot be forged, so equal hashes mean equal tokens, images
and vectors.

If a group of tenants shares a prefix, its blocks are in a chain of hashes that starts at the group. The first block
that is not in the shared prefix is hashed with its tenant. So all blocks from that block on belong to that tenant
alone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import takewhile

from bridle.engine.kv.free_block_pool import FreeBlocks
from bridle.engine.kv.kv_retention import MAX_RETAINED, KVRetention
from bridle.engine.kv.state_manager import StateManager
from bridle.engine.multimodal.multimodal_inputs import marks
from bridle.engine.scheduling.step_plan import BlockCopy
from bridle.engine.sequence import Sequence
from bridle.errors import InternalError

#: Maximum number of adjacent blocks that are reserved ahead for a sequence.
_MAX_RESERVED = 64


def root_hash(*parts: str) -> bytes:
    """Return the hash with which a chain starts. Chains with different `parts` never share blocks."""
    digest = blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_hash(parent: bytes, tokens: Iterable[int], beside: bytes = b"") -> bytes:
    """Return the hash of a full block of `tokens` that follows the chain `parent`. `beside` identifies the images and
    control vectors in the block."""
    return blake2b(parent + array("q", tokens).tobytes() + beside, digest_size=16).digest()


def own_hash(root: bytes, shared: bytes) -> bytes:
    """Return the parent hash of the first block that belongs to one tenant alone. This block follows the shared block
    with the hash `shared`. `root` is the start of the tenant's chains."""
    return blake2b(root + shared, digest_size=16, person=b"bridle-kv-own").digest()


class BlockManager:
    """Owns `num_blocks` blocks of `block_size` positions each. The manager only does the accounting; the backend has
    the KV itself."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        model: str = "",
        max_parked: int = 0,
        park_seconds: float = 0.0,
        max_retained: int = MAX_RETAINED,
        max_asked_blocks: int | None = None,
        num_states: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self.model = model  # the first part of all hashes
        self._free = FreeBlocks(num_blocks)
        self._num_refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}  # block -> hash, for hashed blocks, free or not
        self._block_of: dict[bytes, int] = {}  # hash -> block
        self._tenant_of: dict[int, str] = {}  # tenants of hashed blocks
        self._held: Counter[int] = Counter()  # references by loads, not by sequences
        # called with block, hash and tenant before a block is reused
        self.on_evict: Callable[[int, bytes, str], object] | None = None
        self._pinned: set[bytes] = set()  # hashes that are parked
        self.on_retain: Callable[[int, bytes, str], object] | None = None
        self.parking = KVRetention(
            max_parked if enable_prefix_caching else 0,
            park_seconds,
            self._pin,
            self._unpin,
            max_retained,
            max_asked_blocks,
        )
        self.states = StateManager(num_states, block_size, self._pinned.__contains__)
        self.num_evicted = self.num_published = 0
        self.num_copied = 0

    @property
    def num_free(self) -> int:
        """Return the number of blocks that can be allocated, including cached blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the number of free blocks whose KV may still be reused."""
        return self._free.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks needed for `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    # -- needed blocks -----------------------------------------------------------------------------------

    def num_needed(self, seq: Sequence, end: int) -> int:
        """Return how many blocks `seq` needs to write positions `num_computed .. end-1`, including copies on write."""
        table = seq.kv.block_table
        first = seq.kv.num_computed // self.block_size
        fresh = max(self.blocks_for(end) - len(table), 0)
        last = min(self.blocks_for(end), len(table))
        return fresh + sum(self._num_refs[table[i]] > 1 for i in range(first, last))

    def can_write(self, seq: Sequence, end: int) -> bool:
        """Return True if `seq` can write positions `num_computed .. end-1` without a new block. The result is True for
        most decode steps."""
        size, kv = self.block_size, seq.kv
        if self.states.is_used and not self.states.can_write(seq):
            return False
        table = kv.block_table
        if end > len(table) * size:
            return False
        for block in table[kv.num_computed // size : -(-end // size)]:
            if self._num_refs[block] != 1 or block in self._hash_of:
                return False
        return True

    def can_append(self, seq: Sequence) -> bool:
        """Return True if `seq` can write position `num_computed` without a new block. This method is a faster
        `can_write` for a decode step."""
        if self.states.is_used and not self.states.can_write(seq):
            return False
        number, table = seq.kv.num_computed // self.block_size, seq.kv.block_table
        return number < len(table) and self._num_refs[table[number]] == 1 and table[number] not in self._hash_of

    def num_exclusive(self, seq: Sequence) -> int:
        """Return the number of blocks that become free if `seq` releases all of its blocks."""
        return sum(self._num_refs[block] == 1 for block in seq.kv.block_table)

    # -- allocation and release --------------------------------------------------------------------------

    def match_prefix(self, seq: Sequence) -> int:
        """Return the number of leading tokens of `seq` whose KV is in the cache, at most `seq.max_reusable`. In a model
        with recurrent layers, the number is limited to tokens after which a recurrent state is kept. The call only
        updates the stored hashes of the sequence."""
        num_blocks = self.match_blocks(seq)
        if num_blocks and self.states.is_used:
            num_blocks = self.states.last_frozen(seq.kv.block_hashes[:num_blocks])
        return num_blocks * self.block_size

    def match_blocks(self, seq: Sequence) -> int:
        """Return how many of the first blocks of `seq` are in the cache. Recurrent states are not considered."""
        if not self._caching:
            return 0
        self._extend_hashes(seq, seq.max_reusable)
        num_blocks = 0
        for digest in seq.kv.block_hashes[: seq.max_reusable // self.block_size]:
            if digest not in self._block_of:
                break
            num_blocks += 1
        return num_blocks

    def missing_block(self, seq: Sequence) -> int | None:
        """Return the number of the first block of the waiting sequence `seq` that could be cached but is not. For a
        model with recurrent layers, the result is None, because a block without a state cannot be used."""
        if self.states.is_used:
            return None
        number = self.match_prefix(seq) // self.block_size
        return number if self._caching and number < seq.max_reusable // self.block_size else None

    def num_missing(self, seq: Sequence) -> int:
        """Return the number of free blocks that `seq` needs for all of its tokens. `seq` must not have any block
        yet."""
        cached = self._cached(seq)
        num_idle = sum(self._num_refs[block] == 0 for block in cached)
        return self.blocks_for(len(seq.tokens)) - len(cached) + num_idle

    def _cached(self, seq: Sequence) -> list[int]:
        num_blocks = self.match_prefix(seq) // self.block_size
        return [self._block_of[digest] for digest in seq.kv.block_hashes[:num_blocks]]

    def admit(self, seq: Sequence, num_kept: int = 0) -> bool:
        """Give `seq`, which has no block, its cached blocks. The blocks are given only if there is room for all of the
        sequence's tokens and `num_kept` more blocks. Returns whether the blocks were given. Cached blocks that no
        sequence uses count as free blocks until a sequence uses them."""
        if self.num_missing(seq) > len(self._free) - num_kept:
            return False
        if self.states.is_used and not self.states.has_room(seq):
            return False
        cached = self._cached(seq)
        num_cached = len(cached) * self.block_size
        for block in cached:
            self._refer(block)
        seq.kv.block_table += cached
        seq.kv.num_computed, seq.kv.num_hashed = num_cached, len(cached)
        if self.states.is_used:
            digest = seq.kv.block_hashes[len(cached) - 1] if cached else None
            num_known = max(self.match_blocks(seq), seq.kv.num_in_reach)
            self.states.admit(seq, digest, num_cached, num_known * self.block_size)
        if self.parking.num_blocks:
            self.parking.claim(seq.request.tenant, seq.kv.block_hashes[: len(cached)], seq.request.continues)
        return True

    def allocate(self, seq: Sequence, end: int) -> list[BlockCopy]:
        """Make positions `num_computed .. end-1` of `seq` writable, by allocating or copying blocks. `num_needed`
        blocks must be free. In a model with recurrent layers, a state slot must be free too."""
        table = seq.kv.block_table
        if self.states.is_used:
            self.states.make_writable(seq)
        copies = []
        for i in range(seq.kv.num_computed // self.block_size, self.blocks_for(end)):
            if i == len(table):
                table.append(self._take(seq, table[-1] if table else None))
            elif self._num_refs[table[i]] > 1:
                copies.append(self._copy_on_write(seq, i))
            elif table[i] in self._hash_of:
                self._unpublish(seq, i)
        return copies

    def _copy_on_write(self, seq: Sequence, i: int) -> BlockCopy:
        source = seq.kv.block_table[i]
        target = self._take(seq, None)
        self._release(source)
        seq.kv.block_table[i] = target
        seq.kv.num_mirrored_blocks = min(seq.kv.num_mirrored_blocks, i)
        seq.kv.num_hashed = min(seq.kv.num_hashed, i)
        self.num_copied += 1
        return BlockCopy(source, target)

    def _unpublish(self, seq: Sequence, i: int) -> None:
        """Drop the hash of block i, because the block is about to be rewritten. Only `seq` may refer to the block."""
        digest = self._hash_of[seq.kv.block_table[i]]
        if self.parking.num_blocks:
            self.parking.lose(digest)
        del self._hash_of[seq.kv.block_table[i]], self._tenant_of[seq.kv.block_table[i]], self._block_of[digest]
        seq.kv.num_hashed = min(seq.kv.num_hashed, i)

    def _refer(self, block: int) -> None:
        """Add a reference to a block of the prefix cache."""
        if self._num_refs[block] == 0:
            self._free.revive(block)
        self._num_refs[block] += 1

    def _take(self, seq: Sequence, after: int | None) -> int:
        while self.parking.num_blocks and self._free.has_only_parked:
            self.parking.evict_oldest()
        expected = self.blocks_for(seq.max_len) - len(seq.kv.block_table)
        block, evicted = self._free.allocate(seq.id, after, min(expected, _MAX_RESERVED))
        for old in evicted:
            digest, tenant = self._hash_of.pop(old), self._tenant_of.pop(old)
            del self._block_of[digest]
            if self.on_evict is not None:
                self.on_evict(old, digest, tenant)
        self.num_evicted += len(evicted)
        self._num_refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._num_refs[block] -= 1
        if self._num_refs[block]:
            return
        if block not in self._hash_of:
            self._free.free_plain(block)
        elif self._hash_of[block] in self._pinned:
            self._free.free_parked(block)
        else:
            self._free.free_cached(block)

    def free(self, seq: Sequence) -> None:
        """Release all blocks of `seq`. Blocks with a hash stay in the cache; the blocks at the end of the sequence are
        evicted first."""
        if self.states.is_used:
            self.states.free(seq, self._computed_hashes(seq))
        for block in reversed(seq.kv.block_table):
            self._release(block)
        seq.kv.block_table.clear()
        self._free.release_reservation(seq.id)

    def truncate(self, seq: Sequence) -> None:
        """Release the blocks past the end of `seq`, which was truncated."""
        keep = self.blocks_for(len(seq.tokens))
        for block in reversed(seq.kv.block_table[keep:]):
            self._release(block)
        del seq.kv.block_table[keep:]
        seq.kv.num_mirrored_blocks = min(seq.kv.num_mirrored_blocks, keep)
        num_full = len(seq.tokens) // self.block_size
        del seq.kv.block_hashes[num_full:]
        seq.kv.num_hashed = min(seq.kv.num_hashed, num_full)
        seq.kv.num_shared = min(seq.kv.num_shared, num_full)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Make `child` refer to all of `parent`'s blocks. A block is copied only when one of the sequences writes
        it."""
        child.kv.block_table = parent.kv.block_table.copy()
        for block in child.kv.block_table:
            self._num_refs[block] += 1
        if self.states.is_used:
            self.states.fork(parent, child)

    # -- recurrent states --------------------------------------------------------------------------------

    def settle(self, seq: Sequence) -> None:
        """Lower `num_computed` of the running sequence `seq` if its recurrent state does not match its tokens any more.
        The new value is a position for which there is a state."""
        if self.states.has_news(seq):
            self.states.settle(seq, self._computed_hashes(seq))

    def has_state_for(self, seq: Sequence) -> bool:
        """Return whether `seq` needs no slot for its recurrent state, has one that it does not share, or can get
        one."""
        return not self.states.is_used or self.states.has_room(seq)

    def _computed_hashes(self, seq: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks of `seq` that were computed."""
        self._extend_hashes(seq, seq.kv.num_computed)
        return seq.kv.block_hashes[: seq.kv.num_computed // self.block_size]

    # -- prefix cache ------------------------------------------------------------------------------------

    def publish(self, seq: Sequence) -> None:
        """Add the blocks of `seq` that are now full and computed to the prefix cache."""
        kv = seq.kv
        num_full = kv.num_computed // self.block_size
        if self.states.is_used and self.states.has_news(seq):
            self.states.publish(seq, self._computed_hashes(seq))
        if not self._caching or kv.num_hashed >= num_full:
            return
        self._extend_hashes(seq, kv.num_computed)
        for i in range(kv.num_hashed, num_full):
            block, digest = kv.block_table[i], kv.block_hashes[i]
            if block not in self._hash_of:
                self.publish_block(block, digest, seq.owner_of_block(i))
        kv.num_hashed = num_full

    def publish_block(self, block: int, digest: bytes, tenant: str) -> None:
        """Add a block with this hash to the prefix cache, unless the cache has a block with the same hash."""
        if digest not in self._block_of:
            self.num_published += 1
            self._block_of[digest] = block
            self._hash_of[block], self._tenant_of[block] = digest, tenant

    def forget_content(self) -> None:
        """Clear the prefix cache, because all KV is lost after a reset of the executor. Call this only while no
        sequence has blocks."""
        self.parking.clear()
        self.states.forget_content()
        for block in self._hash_of:
            if not self._num_refs[block]:
                self._free.forget(block)
        self._hash_of.clear()
        self._tenant_of.clear()
        self._block_of.clear()

    # -- blocks that a store reads and writes ------------------------------------------------------------

    def hold(self, digests: Iterable[bytes]) -> list[int]:
        """Add a reference to each block of the prefix cache whose hash is in `digests`, so that the blocks are not
        evicted. Returns the blocks."""
        blocks = [self._block_of[digest] for digest in digests]
        for block in blocks:
            self._refer(block)
        self._held.update(blocks)
        return blocks

    def take_run(self, seq: Sequence, after: int | None, count: int) -> list[int]:
        """Allocate `count` blocks for KV that `seq` will use, if possible right after block `after`. `count` blocks
        must be free."""
        blocks: list[int] = []
        for _ in range(count):
            blocks.append(self._take(seq, blocks[-1] if blocks else after))
        self._held.update(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Release the blocks that `hold` or `take_run` returned."""
        for block in reversed(blocks):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
            self._release(block)

    def idle_hashed(self) -> Iterator[tuple[int, bytes, str]]:
        """Yield the blocks of the prefix cache that no sequence uses, each with its hash and tenant. The block that
        would be evicted last comes first."""
        for block in self._free.newest():
            yield block, self._hash_of[block], self._tenant_of[block]

    # -- parked KV ---------------------------------------------------------------------------------------

    def park(self, seq: Sequence, now: float) -> None:
        """Protect the cached blocks of `seq` from eviction, because `seq` is about to end."""
        request = seq.request
        self.parking.park(request.tenant, (request.id, seq.index), request.adapter, self._published(seq), now)

    def retain(self, seq: Sequence, now: float) -> None:
        """Protect the blocks that the request of `seq` asked to retain, because `seq` is about to end. Sets
        `seq.kv.num_retained` to the number of protected tokens."""
        request, published, num_blocks = seq.request, self._published(seq), 0
        for wish in request.retains:
            held = published[: wish.num_tokens // self.block_size]
            if self.on_retain is not None:
                for digest in held:
                    block = self._block_of[digest]
                    self.on_retain(block, digest, self._tenant_of[block])
            num_blocks = max(num_blocks, self.parking.retain(request.tenant, request.adapter, held, wish, now))
        seq.kv.num_retained = num_blocks * self.block_size

    def _published(self, seq: Sequence) -> list[bytes]:
        digests = seq.kv.block_hashes[: min(seq.kv.num_hashed, seq.kv.num_computed // self.block_size)]
        return list(takewhile(self._block_of.__contains__, digests))

    def renew(self, seq: Sequence, now: float) -> None:
        """Extend the protection of the retained blocks that the queued sequence `seq` will reuse."""
        num_cached = self.match_prefix(seq)
        digests = seq.kv.block_hashes[: num_cached // self.block_size]
        self.parking.renew(seq.request.tenant, digests, now, seq.request.continues)

    def _pin(self, digest: bytes) -> None:
        self._pinned.add(digest)
        self.states.on_pin_change(digest)
        block = self._block_of[digest]
        if self._num_refs[block] == 0:
            self._free.park(block)

    def _unpin(self, digest: bytes) -> None:
        self._pinned.discard(digest)
        self.states.on_pin_change(digest)
        block = self._block_of[digest]
        if self._num_refs[block] == 0:
            self._free.unpark(block)

    def _extend_hashes(self, seq: Sequence, num_tokens: int) -> None:
        size, hashes = self.block_size, seq.kv.block_hashes
        while (len(hashes) + 1) * size <= num_tokens:
            parent = self._parent_hash(seq)
            start = len(hashes) * size
            beside = marks(seq.runs, start, start + size) if seq.runs else b""
            if seq.vectors is not None:
                beside += seq.vectors.marks(start, start + size)
            hashes.append(block_hash(parent, seq.tokens[start : start + size], beside))

    def _parent_hash(self, seq: Sequence) -> bytes:
        """Return the parent hash of the next block of `seq`. Also record whether the next block belongs to the shared
        prefix."""
        hashes, kv, request = seq.kv.block_hashes, seq.kv, seq.request
        if kv.num_shared < len(hashes):
            return hashes[-1]
        parts = self.model, request.adapter or ""
        if (shared := request.shared) is not None and self._is_shared(seq, len(hashes), shared.num_tokens):
            kv.num_shared += 1
            return hashes[-1] if hashes else root_hash(*parts, "", shared.group)
        root = root_hash(*parts, request.tenant)
        return own_hash(root, hashes[-1]) if hashes else root

    def _is_shared(self, seq: Sequence, number: int, num_tokens: int) -> bool:
        """Return whether a block lies within the shared prefix of `num_tokens` tokens and has the same tokens as the
        prompt."""
        start, end = number * self.block_size, (number + 1) * self.block_size
        return end <= num_tokens and tuple(seq.tokens[start:end]) == seq.request.prompt[start:end]

    # -- checks ------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `InternalError` if a rule of this module does not hold. `sequences` must be all active sequences."""
        refs = [0] * self.num_blocks
        sequences = list(sequences)
        self.states.check_integrity(sequences)
        for seq in sequences:
            self._check_sequence(seq)
            for block in seq.kv.block_table:
                refs[block] += 1
        for block, num_held in self._held.items():
            refs[block] += num_held
        if refs != self._num_refs:
            wrong = [b for b in range(self.num_blocks) if refs[b] != self._num_refs[b]]
            raise InternalError(f"reference counts of blocks {wrong[:8]} do not match the block tables")
        free = self._free.free_ids()
        if len(free) != self.num_free or free != {b for b in range(self.num_blocks) if not refs[b]}:
            raise InternalError(
                f"{self.num_free} of {self.num_blocks} KV blocks are counted as free, but {len(free)} are listed as "
                "free"
            )
        directions = self._block_of, {digest: block for block, digest in self._hash_of.items()}
        if directions[0] != directions[1] or self._tenant_of.keys() != self._hash_of.keys():
            raise InternalError("the prefix cache's maps from hash to block and from block to hash disagree")
        self._check_parked()

    def _check_parked(self) -> None:
        self.parking.check_integrity()
        digests = self.parking.digests()
        idle = {self._block_of[digest] for digest in digests if not self._num_refs[self._block_of[digest]]}
        if digests != self._pinned or self._free.parked_ids() != idle:
            raise InternalError(
                f"{len(digests)} KV blocks are retained, but {len(self._free.parked_ids())} are protected in the "
                "free block pool"
            )

    def _check_sequence(self, seq: Sequence) -> None:
        if seq.kv.num_computed > len(seq.kv.block_table) * self.block_size:
            raise InternalError(
                f"sequence {seq.id} has {seq.kv.num_computed} computed tokens, more than fit into its "
                f"{len(seq.kv.block_table)} KV blocks"
            )
        if len(set(seq.kv.block_table)) != len(seq.kv.block_table):
            raise InternalError(f"the block table of sequence {seq.id} has a block twice: {seq.kv.block_table}")
