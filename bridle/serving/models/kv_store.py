"""Opens the stores for the KV blocks of a model, on disk and in the host's memory, if the executor supports them."""

from __future__ import annotations

import logging
import re
from hashlib import blake2b
from typing import TYPE_CHECKING

from bridle.config import EngineConfig
from bridle.engine.interfaces import Executor, find_device_blocks, find_kv_blocks, find_sequence_states
from bridle.engine.kv.stored_sequences import PIECE_BYTES
from bridle.errors import InvalidRequest
from bridle.kv_store import BlockStore, HostMemory, NoDisk, SegmentStore
from bridle.kv_store.readers import PACE
from bridle.kv_store.records import HEADER_BYTES
from bridle.kv_store.segment import HAS_LOCKS
from bridle.kv_store.settings import AUTO, StoreSettings, read_settings
from bridle.kv_store.store import NUM_SEGMENTS

if TYPE_CHECKING:
    from bridle.engine.interfaces import KVBlocks, SequenceStates

_log = logging.getLogger(__name__)

#: Maximum number of bytes of a backend's sequences that wait to be written. A longer sequence is not stored.
MAX_SEQUENCE_BYTES = 512 << 20


def open_store(executor: Executor, config: EngineConfig) -> BlockStore | None:
    """Open the stores that `config` requests: on disk, in the host's memory, or both. If `config` requests no store, no
    store is opened and the result is None. Raises `InvalidRequest` for a model that cannot use the requested stores."""
    memory = _host_memory(executor, config) if config.kv_host_bytes else None
    store = _open_disk(executor, config)
    device = find_kv_blocks(executor, config.kv_store_format)
    if store is None and memory is not None and device is not None:
        store = NoDisk(blake2b(device.identity().encode(), digest_size=16).hexdigest())
    if store is None or find_sequence_states(executor) is None:
        is_apart = find_device_blocks(executor) is not None  # steps do not compete with the reads for CPU time
        return None if store is None else BlockStore(store, memory=memory, pace=0.0 if is_apart else PACE)
    return BlockStore(store, MAX_SEQUENCE_BYTES)


def _host_memory(executor: Executor, config: EngineConfig) -> HostMemory:
    device, limit = find_device_blocks(executor, config.kv_store_format), config.kv_host_bytes
    if device is None or not config.enable_prefix_caching:
        raise InvalidRequest(
            f"kv_host_bytes is {limit}; this needs prefix caching, and a model on a GPU in the engine's process. On "
            "a CPU the KV cache is in host memory already: enlarge it with kv_memory",
            "kv_host_bytes",
        )
    if limit < (least := max(device.block_bytes, device.state_bytes)):
        raise InvalidRequest(
            f"kv_host_bytes is {limit}; must be at least {least}, the size of one KV block of this model",
            "kv_host_bytes",
        )
    return HostMemory(limit, device.allocate_host)


def _open_disk(executor: Executor, config: EngineConfig) -> SegmentStore | None:
    """Open the store on disk; None if no store on disk is configured. If `kv_store` is `auto`, the result is None on a
    GPU, without a writable folder, or for a model that cannot use a store. If `kv_store` names a folder,
    `InvalidRequest` is raised for a GPU, a read-only folder, or a model that cannot use a store."""
    try:
        settings = read_settings(config.kv_store, config.kv_store_bytes, config.kv_store_key)
    except InvalidRequest as error:
        if config.kv_store != AUTO or error.param != "kv_store":
            raise
        _log_without(executor, str(error))
        return None
    if settings is None:
        return None
    device, problem = _find(executor, config.kv_store_format), _problem(executor, config)
    if config.kv_store == AUTO and find_device_blocks(executor) is not None:
        problem = "its KV is on a GPU; name a folder to store it"
    if problem is None and device is not None:
        problem = _too_small(device, settings)
    if problem is not None or device is None:
        if config.kv_store == AUTO:
            _log_without(executor, problem)
            return None
        raise InvalidRequest(f"kv_store is {config.kv_store!r}; {problem}", "kv_store")
    identity = blake2b(device.identity().encode(), digest_size=16).hexdigest()
    if settings.cipher is not None:
        identity = settings.cipher.derive(identity)  # blocks that were written with another key are not found
    name = re.sub(r"[^A-Za-z0-9._-]", "_", executor.info.model.rstrip("/").rpartition("/")[2])[:60] or "model"
    store = SegmentStore(settings.folder, f"{name}-{identity}", settings.limit, settings.cipher)
    room = settings.limit >> 20
    _log.debug("kv_store: %d blocks in %s, at most %d MiB for all models", len(store), settings.folder, room)
    return store


def _log_without(executor: Executor, problem: str | None) -> None:
    _log.info("kv_store: model %s is served without a KV store: %s", executor.info.model, problem)


def _find(executor: Executor, kind: str) -> KVBlocks | SequenceStates | None:
    return find_kv_blocks(executor, kind) or (find_sequence_states(executor) if kind == "exact" else None)


def _problem(executor: Executor, config: EngineConfig) -> str | None:
    """Return why the blocks of an executor cannot be stored, and what to change; None if the blocks can be stored."""
    if not HAS_LOCKS:
        return "this system has no file locks; leave kv_store out"
    if not config.enable_prefix_caching:
        return "without prefix caching nothing would be found in it; turn one of them off"
    if find_kv_blocks(executor) is None and find_sequence_states(executor) is None:
        return "it needs a model in the process of its engine; leave out kv_store, or isolate_model and shards"
    if _find(executor, config.kv_store_format) is None:
        return (
            f"kv_store_format is {config.kv_store_format!r}; it needs a KV cache of floating-point numbers that torch "
            "computes. Leave it out: KV in 8 bits and that of llamacpp is stored exactly"
        )
    return None


def _too_small(device: KVBlocks | SequenceStates, settings: StoreSettings) -> str | None:
    overhead = HEADER_BYTES + (0 if settings.cipher is None else settings.cipher.overhead)
    sizes = (getattr(device, "block_bytes", PIECE_BYTES), getattr(device, "state_bytes", 0))
    least, limit = NUM_SEGMENTS * (max(sizes) + overhead), settings.limit
    return None if limit >= least else f"kv_store_bytes is {limit}; a store of this model needs at least {least}"
