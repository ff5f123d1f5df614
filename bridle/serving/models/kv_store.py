"""Opens the store for the KV blocks of a model, where its executor has blocks that can be stored."""

from __future__ import annotations

import logging
import re
from hashlib import blake2b
from typing import TYPE_CHECKING

from bridle.config import EngineConfig
from bridle.engine.interfaces import Executor, find_kv_blocks
from bridle.errors import InvalidRequest
from bridle.kv_store import BlockStore, SegmentStore
from bridle.kv_store.records import HEADER_BYTES
from bridle.kv_store.segment import HAS_LOCKS
from bridle.kv_store.settings import AUTO, StoreSettings, read_settings
from bridle.kv_store.store import NUM_SEGMENTS

if TYPE_CHECKING:
    from bridle.engine.interfaces import KVBlocks

_log = logging.getLogger(__name__)


def open_store(executor: Executor, config: EngineConfig) -> BlockStore | None:
    """Open the store that `config` asks for; None if it asks for none. With `auto`, a model that cannot use a store has
    none. Otherwise that raises `InvalidRequest`."""
    settings = read_settings(config.kv_store, config.kv_store_bytes, config.kv_store_key)
    if settings is None:
        return None
    device, problem = find_kv_blocks(executor), _problem(executor, config)
    if problem is None and device is not None:
        problem = _too_small(device, settings)
    if problem is not None or device is None:
        if config.kv_store == AUTO:
            _log.info("kv_store: %s is served without one: %s", executor.info.model, problem)
            return None
        raise InvalidRequest(f"kv_store is {config.kv_store!r}; {problem}", "kv_store")
    identity = blake2b(device.identity().encode(), digest_size=16).hexdigest()
    if settings.cipher is not None:
        identity = settings.cipher.derive(identity)  # blocks of another key are none of this store
    name = re.sub(r"[^A-Za-z0-9._-]", "_", executor.info.model.rstrip("/").rpartition("/")[2])[:60] or "model"
    store = SegmentStore(settings.folder, f"{name}-{identity}", settings.limit, settings.cipher)
    room = settings.limit >> 20
    _log.info("kv_store: %d blocks in %s, at most %d MiB for all models", len(store), settings.folder, room)
    return BlockStore(store)


def _problem(executor: Executor, config: EngineConfig) -> str | None:
    """Return the reason for which no block of an executor can be stored, with what would have to change."""
    if not HAS_LOCKS:
        return "this system has no file locks; leave kv_store out"
    if not config.enable_prefix_caching:
        return "without prefix caching nothing would be found in it; turn one of them off"
    if find_kv_blocks(executor) is None:
        return (
            "it needs a model that torch computes on a CPU in the process of its engine; leave out kv_store, or "
            "isolate_model, shards and the llamacpp backend"
        )
    return None


def _too_small(device: KVBlocks, settings: StoreSettings) -> str | None:
    overhead = HEADER_BYTES + (0 if settings.cipher is None else settings.cipher.overhead)
    least, limit = NUM_SEGMENTS * (max(device.block_bytes, device.state_bytes) + overhead), settings.limit
    return None if limit >= least else f"kv_store_bytes is {limit}; a store of this model needs at least {least}"
