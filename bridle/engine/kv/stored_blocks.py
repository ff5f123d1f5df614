"""Blocks of the prefix cache in a store below memory: written when they are evicted or a client retains them, found
before a prompt is computed.

A block is copied before it is reused, so the store never sees what comes after. A waiting sequence whose next blocks
are stored is given room for them, waits until they are read, and then finds them in the prefix cache like any others.
Steps do not wait for it. Blocks that are being read are referenced by their `_Loading` alone, so nobody else reads or
writes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from bridle.engine.interfaces import Executor, KVBlocks, find_kv_blocks
from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.sequence import Sequence
from bridle.kv_store import BlockStore, Load, LoadedBlock
from bridle.kv_store.records import tenant_tag

#: How many loads run at once.
MAX_LOADS = 4
#: For how many seconds an engine that closes writes what is in memory.
SAVE_SECONDS = 10.0
#: Seconds after which an engine without work begins to write what is in memory; blocks at once, and the pause between.
IDLE_SECONDS = 5.0
_IDLE_BLOCKS, _IDLE_PAUSE = 8, 0.02


@dataclass(slots=True, eq=False)
class _Loading:
    """Blocks that are being read after `num_held` blocks of the prefix cache, and the sequences that wait for them."""

    tenant: str
    digests: list[bytes]
    held: list[int]
    blocks: list[int]
    load: Load
    waiting: list[Sequence] = field(default_factory=list)
    is_stale: bool = False  # what they follow was lost meanwhile


class StoredBlocks:
    """The store of one engine, with the blocks of its device."""

    def __init__(self, blocks: BlockManager, store: BlockStore, device: KVBlocks) -> None:
        self._blocks, self._store, self._device = blocks, store, device
        self.loads: list[_Loading] = []
        self._loading: dict[bytes, _Loading] = {}
        self._num_saved = 0  # blocks that had been published when all of them were offered
        self._idle_since: float | None = None
        self.num_restored_tokens = 0
        blocks.on_evict = blocks.on_retain = self._offer
        blocks.model = store.store.scope

    @staticmethod
    def over(blocks: BlockManager, store: BlockStore | None, executor: Executor) -> StoredBlocks | None:
        """Return the store with the blocks of an executor; None without a store."""
        device = None if store is None else find_kv_blocks(executor)
        return None if store is None or device is None else StoredBlocks(blocks, store, device)

    # -- writing -----------------------------------------------------------------------------------------

    def _offer(self, block: int, digest: bytes, tenant: str) -> bool:
        """Copy a block that is about to be reused."""
        device = self._device
        return self._store.offer(digest, tenant_tag(tenant), device.block_bytes, partial(device.read_block, block))

    def _save(self) -> None:
        """Write the blocks of the prefix cache, those first that were used last, for at most `SAVE_SECONDS` and as far
        as the store has room. The engine computes nothing any more, so it writes them itself."""
        deadline, num_bytes = time.monotonic() + SAVE_SECONDS, 0
        for block, digest, tenant in self._blocks.idle_hashed():
            num_bytes += self._device.block_bytes
            if time.monotonic() >= deadline or num_bytes > self._store.store.limit // 2:
                break  # more would push out what was written first
            if not self._store.has(digest):
                self._store.write(digest, tenant_tag(tenant), self._device.read_block(block))

    def rest(self, now: float) -> float | None:
        """Write some of what is in memory if the engine has been idle for long enough, so that it outlives a crash.
        Returns the seconds until the next call; None if there is nothing to write."""
        if self._num_saved == self._blocks.num_published:
            return None
        if self._idle_since is None:
            self._idle_since = now
        left = self._idle_since + IDLE_SECONDS - now
        if left > 0:
            return left
        return None if self._save_some() else _IDLE_PAUSE

    def _save_some(self) -> bool:
        """Offer some blocks. Returns whether all of them are stored or were offered."""
        num_published, num_offered = self._blocks.num_published, 0
        for block, digest, tenant in self._blocks.idle_hashed():
            if self._store.has(digest):
                continue
            if num_offered == _IDLE_BLOCKS or not self._store.has_room(self._device.block_bytes):
                return False
            self._offer(block, digest, tenant)
            num_offered += 1
        self._num_saved = num_published
        return True

    # -- reading -----------------------------------------------------------------------------------------

    def begin_step(self, next_in_line: Iterable[Sequence], is_busy: bool) -> None:
        """Publish what was read, and begin to read what the sequences that are next in line lack. `is_busy` says
        whether others are computed meanwhile."""
        self._idle_since = None
        if self.loads:
            self._finish_loads()
        for seq in next_in_line:
            if not (seq.kv.is_looked_up or seq.queue.awaits_kv or self._look_up(seq, is_busy)):
                break

    def _look_up(self, seq: Sequence, is_busy: bool) -> bool:
        """Search what `seq` lacks. Returns False if it has to be done later, for lack of room."""
        blocks, size = self._blocks, self._blocks.block_size
        num_matched = blocks.match_prefix(seq) // size
        missing = seq.kv.block_hashes[num_matched : seq.max_reusable // size]
        if missing and (loading := self._loading.get(missing[0])) is not None:
            loading.waiting.append(seq)
            seq.queue.awaits_kv = True
            return True
        found = missing[: self._store.count_present(missing)]
        if found and (len(self.loads) >= MAX_LOADS or blocks.num_missing(seq) > blocks.num_free):
            return False
        seq.kv.is_looked_up = True
        if found:
            self._begin_load(seq, num_matched, found, is_busy)
        return True

    def _begin_load(self, seq: Sequence, num_matched: int, digests: list[bytes], is_busy: bool) -> None:
        held = self._blocks.hold(seq.kv.block_hashes[:num_matched])
        taken = self._blocks.take_run(seq, held[-1] if held else None, len(digests))
        wanted = [
            LoadedBlock(digest, self._device.block_bytes, partial(self._device.write_block, block))
            for digest, block in zip(digests, taken, strict=True)
        ]
        loading = _Loading(seq.request.tenant, digests, held, taken, self._store.load(wanted, is_busy), [seq])
        seq.queue.awaits_kv = True
        self.loads.append(loading)
        self._loading.update(dict.fromkeys(digests, loading))

    def _finish_loads(self) -> None:
        for loading in [each for each in self.loads if each.load.is_done]:
            self.loads.remove(loading)
            num_loaded = 0 if loading.is_stale else loading.load.num_loaded
            for digest in loading.digests:
                if self._loading.get(digest) is loading:
                    del self._loading[digest]
            for block, digest in zip(loading.blocks[:num_loaded], loading.digests, strict=False):
                self._blocks.publish_block(block, digest, loading.tenant)
            self._blocks.release([*loading.held, *loading.blocks])
            self.num_restored_tokens += num_loaded * self._blocks.block_size
            for seq in loading.waiting:
                seq.queue.awaits_kv = False

    # -- life --------------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Return whether blocks are being read."""
        return bool(self.loads)

    def forget_content(self) -> None:
        """All KV is lost. What is being read follows nothing any more."""
        for loading in self.loads:
            loading.is_stale = True

    def close(self) -> None:
        """End the threads of the store, and write what is in memory."""
        self._store.stop()
        self._save()
        self._store.close()

    def counts(self) -> dict[str, int]:
        """Counters for the engine's statistics. Safe from any thread."""
        store = self._store
        return {
            "num_stored_blocks": store.num_written,
            "num_restored_tokens": self.num_restored_tokens,
            "num_store_drops": store.num_dropped,
            "num_stored_bytes": store.written_bytes,
            "num_restored_bytes": store.read_bytes,
            "num_blocks_in_store": len(store.store),
        }
