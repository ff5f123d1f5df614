"""Stores blocks of the prefix cache outside of device memory: in host memory or on disk. Blocks are stored when they
are evicted or when a client retains them. The store is searched for blocks before a prompt is computed.

A block is copied before it is reused, so the store never gets the block's later content. If the next blocks of a
waiting sequence are stored, blocks are allocated for them, and the sequence waits until they are read. The sequence
then finds the blocks in the prefix cache. Steps of the engine do not wait for reads. Blocks that are being read belong
only to their `_Loading`, so no sequence reads or writes them.

In a model with recurrent layers, cached blocks can be used only up to a stored state. A state is stored under a key
that is derived from the hash of the block where it ends. Each read of a sequence's blocks ends with a state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from bridle.engine.interfaces import Executor, KVBlocks, find_kv_blocks
from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.sequence import Sequence
from bridle.kv_store import BlockStore, Load, LoadedBlock, Snapshot
from bridle.kv_store.records import Buffer, bytes_of, state_key, tenant_tag

#: Maximum number of loads at the same time.
MAX_LOADS = 4
#: Maximum number of blocks of a load while other sequences are computed. A step that begins a load also copies the
#: blocks that the load evicts.
MAX_BUSY_BLOCKS = 32
#: Maximum number of seconds in which a closing engine writes the contents of memory to the store.
SAVE_SECONDS = 10.0
#: Seconds without work after which an engine begins to write the contents of memory to the store. Below: number of
#: entries per write, and seconds between writes.
IDLE_SECONDS = 5.0
_IDLE_ENTRIES, _IDLE_PAUSE = 8, 0.02


class _Entry(NamedTuple):
    """A block or a state to store: its key, the tag of its tenant, its size in bytes, and the function that copies
    it."""

    key: bytes
    tenant: bytes
    num_bytes: int
    copy: Callable[[], Buffer | Snapshot]


class _Missing(NamedTuple):
    """Stored parts of a sequence that are not in device memory. The parts are the blocks `digests`, which follow the
    cached blocks `held`, and the recurrent state at the end of block `state`."""

    held: list[bytes]
    digests: list[bytes]
    state: bytes | None = None

    def first(self, num_blocks: int) -> _Missing:
        """Return the stored parts with only the first `num_blocks` blocks. If blocks are left out, the state is left
        out too."""
        return self if len(self.digests) <= num_blocks else _Missing(self.held, self.digests[:num_blocks])

    @property
    def keys(self) -> list[bytes]:
        """Return the store's keys of the parts, in the order in which they are read."""
        return self.digests if self.state is None else [*self.digests, state_key(self.state)]


@dataclass(slots=True, eq=False)
class _Loading:
    """A read of stored blocks that is in progress: the parts to read, their owners, and the blocks before them. The
    read also has the blocks and the state slot to fill, and the sequences that wait for them."""

    owners: list[str]  # tenants of the parts with the keys `missing.keys`
    missing: _Missing
    held: list[int]
    blocks: list[int]
    slot: int | None
    load: Load
    waiting: list[Sequence] = field(default_factory=list)
    is_stale: bool = False  # the blocks before the missing ones were lost meanwhile


class StoredBlocks:
    """Connects the store of one engine with the KV blocks of its device."""

    def __init__(self, blocks: BlockManager, store: BlockStore, device: KVBlocks) -> None:
        self._blocks, self._store, self._device = blocks, store, device
        self.loads: list[_Loading] = []
        self._loading: dict[bytes, _Loading] = {}
        self._num_saved = 0  # blocks and states that had been published when all entries had been offered
        self._idle_since: float | None = None
        self.num_restored_tokens = 0
        blocks.on_evict, blocks.on_retain = self._offer_block, self._offer_retained
        blocks.states.on_evict = self._offer_state
        blocks.model = store.store.root

    @staticmethod
    def over(blocks: BlockManager, store: BlockStore | None, executor: Executor, kind: str) -> StoredBlocks | None:
        """Return the stored blocks of an executor, in the format `kind`; None without a store."""
        device = None if store is None else find_kv_blocks(executor, kind)
        return None if store is None or device is None else StoredBlocks(blocks, store, device)

    # -- writing -----------------------------------------------------------------------------------------

    def _block_entry(self, block: int, digest: bytes, tenant: str) -> _Entry:
        device = self._device
        return _Entry(digest, tenant_tag(tenant), device.block_bytes, partial(device.read_block, block))

    def _state_entry(self, slot: int, digest: bytes, tenant: str) -> _Entry:
        device = self._device
        return _Entry(state_key(digest), tenant_tag(tenant), device.state_bytes, partial(device.read_state, slot))

    def _offer_block(self, block: int, digest: bytes, tenant: str) -> None:
        """Offer a block to the store before the block is reused."""
        self._store.offer(*self._block_entry(block, digest, tenant))

    def _offer_state(self, slot: int, digest: bytes, tenant: str) -> None:
        """Offer a state to the store before the state is evicted."""
        self._store.offer(*self._state_entry(slot, digest, tenant))

    def _offer_retained(self, block: int, digest: bytes, tenant: str) -> None:
        self._offer_block(block, digest, tenant)
        if (slot := self._blocks.states.lasting(digest)) is not None:
            self._offer_state(slot, digest, tenant)

    def _unsaved(self) -> Iterator[_Entry]:
        """Yield the cached blocks that no sequence uses, and the states at their ends, unless they are already stored.
        The most recently used blocks and states come first."""
        has, states = self._store.has, self._blocks.states
        for block, digest, tenant in self._blocks.idle_hashed():
            if not has(digest):
                yield self._block_entry(block, digest, tenant)
            if states.is_used and (slot := states.lasting(digest)) is not None and not has(state_key(digest)):
                yield self._state_entry(slot, digest, tenant)

    def _save(self) -> None:
        """Store the cached blocks and states, for at most `SAVE_SECONDS` seconds and while the store has room. The
        engine's thread does this work after the engine has stopped computing."""
        deadline, num_bytes = time.monotonic() + SAVE_SECONDS, 0
        for entry in chain(self._unsaved(), self._unsaved_on_host()):
            num_bytes += entry.num_bytes
            if time.monotonic() >= deadline or num_bytes > self._store.store.limit // 2:
                break  # writing more would evict what was written first
            self._store.write(entry.key, entry.tenant, bytes_of(entry.copy(), entry.num_bytes))

    def _unsaved_on_host(self) -> Iterator[_Entry]:
        """Yield the blocks and states in host memory that are not on disk."""
        host, on_disk = self._store.host, self._store.store
        for key, tenant, block in () if host is None else host.newest():
            if key not in on_disk:
                yield _Entry(key, tenant, len(block), partial(as_it_is, block))

    def rest(self, now: float) -> float | None:
        """Store some cached blocks if the engine has been idle for long enough. Stored blocks survive a crash. Returns
        the seconds until the next call is needed, or None if everything is stored."""
        if self._num_saved == self._num_published or not self._store.is_lasting:
            return None
        if self._idle_since is None:
            self._idle_since = now
        left = self._idle_since + IDLE_SECONDS - now
        if left > 0:
            return left
        return None if self._save_some() else _IDLE_PAUSE

    @property
    def _num_published(self) -> int:
        return self._blocks.num_published + self._blocks.states.num_published

    def _save_some(self) -> bool:
        """Offer some cached blocks and states to the store. Returns whether all blocks and states are stored or were
        offered."""
        for number, entry in enumerate(self._unsaved()):
            if number == _IDLE_ENTRIES or not self._store.has_room(entry.num_bytes):
                return False
            self._store.offer(*entry)
        self._num_saved = self._num_published
        return True

    # -- reading -----------------------------------------------------------------------------------------

    def begin_step(self, next_in_line: Iterable[Sequence], is_busy: bool) -> None:
        """Add the blocks that have been read to the prefix cache, and begin to read stored blocks for the next waiting
        sequences. `is_busy` says whether other sequences are computed during the reads."""
        self._idle_since = None
        if self.loads:
            self._finish_loads()
        for loading in () if is_busy else self.loads:
            loading.load.pace = 0.0
        for seq in next_in_line:
            if not (seq.kv.is_looked_up or seq.queue.awaits_kv or self._look_up(seq, is_busy)):
                break

    def _look_up(self, seq: Sequence, is_busy: bool) -> bool:
        """Search the store for blocks of `seq` that are not in device memory. Returns False if there is no room now;
        the search must then be repeated later."""
        missing = self._find(seq)
        if missing.keys and (loading := self._loading.get(missing.keys[0])) is not None:
            loading.waiting.append(seq)
            seq.queue.awaits_kv = True
            return True
        part = missing.first(MAX_BUSY_BLOCKS) if is_busy else missing
        if missing.keys and not self._begin_load(seq, part, is_busy):
            return False
        seq.kv.is_looked_up = part is missing
        return True

    def _find(self, seq: Sequence) -> _Missing:
        """Return the stored parts that extend the cached beginning of `seq` as far as possible."""
        num_held = self._blocks.match_blocks(seq)
        digests = seq.kv.block_hashes[: seq.max_reusable // self._blocks.block_size]
        num_found = num_held + self._store.count_present(digests[num_held:])
        if not self._blocks.states.is_used:
            return _Missing(digests[:num_held], digests[num_held:num_found])
        seq.kv.num_in_reach = num_found
        return self._find_state(digests[:num_found], num_held)

    def _find_state(self, digests: list[bytes], num_held: int) -> _Missing:
        """Return the blocks that must be read to extend the cached ones up to the last block whose state is stored."""
        states, has = self._blocks.states, self._store.has
        for number in range(len(digests), 0, -1):
            last = digests[number - 1]
            if last in states or has(state_key(last)):
                state = None if last in states else last
                return _Missing(digests[: min(num_held, number)], digests[num_held:number], state)
        return _Missing([], [])

    def _begin_load(self, seq: Sequence, missing: _Missing, is_busy: bool) -> bool:
        """Begin to read stored blocks if device memory has room for them. Returns whether there was room in device
        memory."""
        blocks, device, slot = self._blocks, self._device, None
        if len(self.loads) >= MAX_LOADS or blocks.num_missing(seq) > blocks.num_free:
            return False
        if missing.state is not None and (slot := blocks.states.take_slot()) is None:
            return False
        held = blocks.hold(missing.held)
        taken = blocks.take_run(seq, held[-1] if held else None, len(missing.digests))
        wanted = [
            LoadedBlock(digest, device.block_bytes, partial(device.write_block, block))
            for digest, block in zip(missing.digests, taken, strict=True)
        ]
        if slot is not None:
            wanted.append(LoadedBlock(missing.keys[-1], device.state_bytes, partial(device.write_state, slot)))
        load = self._store.load(wanted, is_busy)
        numbers = range(len(held), len(held) + len(taken))
        owners = [seq.owner_of_block(number) for number in (*numbers, numbers.stop - 1)[: len(missing.keys)]]
        loading = _Loading(owners, missing, held, taken, slot, load, [seq])
        seq.queue.awaits_kv = True
        self.loads.append(loading)
        self._loading.update(dict.fromkeys(missing.keys, loading))
        return True

    def _finish_loads(self) -> None:
        for loading in [each for each in self.loads if each.load.is_done]:
            self.loads.remove(loading)
            for key in loading.missing.keys:
                if self._loading.get(key) is loading:
                    del self._loading[key]
            self._publish(loading, 0 if loading.is_stale else loading.load.num_loaded)
            is_whole = loading.load.num_loaded == len(loading.missing.keys)
            for seq in loading.waiting:
                seq.queue.awaits_kv = False
                seq.kv.is_looked_up |= not is_whole  # blocks that cannot be read are not tried again

    def _publish(self, loading: _Loading, num_loaded: int) -> None:
        """Add the first `num_loaded` blocks of a finished read to the prefix cache."""
        missing, loaded = loading.missing, loading.blocks[:num_loaded]
        for block, digest, owner in zip(loaded, missing.digests, loading.owners, strict=False):
            self._blocks.publish_block(block, digest, owner)
        if loading.slot is not None:
            state = missing.state if num_loaded == len(missing.keys) else None
            self._blocks.states.end_load(loading.slot, state, loading.owners[-1])
        self._blocks.release([*loading.held, *loading.blocks])
        self.num_restored_tokens += len(loaded) * self._blocks.block_size

    # -- state and shutdown ------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Return whether blocks are being read."""
        return bool(self.loads)

    def forget_content(self) -> None:
        """Record that all KV in memory is lost. The blocks before those that are being read are lost too."""
        for loading in self.loads:
            loading.is_stale = True

    def close(self) -> None:
        """Store the cached blocks, and end the threads of the store."""
        self._store.stop()
        self._save()
        self._store.close()

    def counts(self) -> dict[str, int]:
        """Return the counters for the engine's statistics. Safe from any thread."""
        return {"num_restored_tokens": self.num_restored_tokens, **self._store.counts()}


def as_it_is(block: Buffer) -> Buffer:
    """Return the stored bytes unchanged; they are already encoded."""
    return block
