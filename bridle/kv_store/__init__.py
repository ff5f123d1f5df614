"""KV blocks on disk: append-only segments that several processes share, and the threads that move blocks.

Blocks are runs of bytes under 16-byte keys. What they hold, and where they belong in a KV cache, is the engine's
business.
"""

from bridle.kv_store.background import BlockStore, Load, LoadedBlock
from bridle.kv_store.settings import StoreSettings, default_folder, default_limit
from bridle.kv_store.store import SegmentStore, forget_tenant

__all__ = [
    "BlockStore",
    "Load",
    "LoadedBlock",
    "SegmentStore",
    "StoreSettings",
    "default_folder",
    "default_limit",
    "forget_tenant",
]
