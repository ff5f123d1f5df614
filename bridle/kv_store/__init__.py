"""KV blocks in the host's memory and on disk, in append-only segments that several processes share, and the threads
that move blocks.

Blocks are runs of bytes under 16-byte keys. This package does not know the contents of the blocks, nor their place in a
KV cache.
"""

from bridle.kv_store.background import BlockStore
from bridle.kv_store.host_memory import HostMemory
from bridle.kv_store.readers import Load, LoadedBlock
from bridle.kv_store.records import Snapshot
from bridle.kv_store.settings import StoreSettings, default_folder, default_limit
from bridle.kv_store.store import NoDisk, SegmentStore, forget_tenant

__all__ = [
    "BlockStore",
    "HostMemory",
    "Load",
    "LoadedBlock",
    "NoDisk",
    "SegmentStore",
    "Snapshot",
    "StoreSettings",
    "default_folder",
    "default_limit",
    "forget_tenant",
]
