"""KV blocks in the host's memory and on disk, and the threads that move them. On disk, blocks are in append-only
segments that several processes share.

A block is a string of bytes with a key of 16 bytes. This package does not interpret the blocks.
"""

from bridle.kv_store.background import BlockStore as BlockStore
from bridle.kv_store.host_memory import HostMemory as HostMemory
from bridle.kv_store.readers import Load as Load
from bridle.kv_store.readers import LoadedBlock as LoadedBlock
from bridle.kv_store.records import Snapshot as Snapshot
from bridle.kv_store.settings import StoreSettings as StoreSettings
from bridle.kv_store.settings import default_folder as default_folder
from bridle.kv_store.settings import default_limit as default_limit
from bridle.kv_store.store import NoDisk as NoDisk
from bridle.kv_store.store import SegmentStore as SegmentStore
from bridle.kv_store.store import forget_tenant as forget_tenant
