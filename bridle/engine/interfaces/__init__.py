"""The interfaces (protocols) of the engine: executors, controllers, adapter stores and text decoders.

The engine depends only on the protocols in this package. Backends such as `bridle.model` (torch) and `bridle.testing`
(scripted) implement `Executor`. Python objects, constraints and the Wasm runtime each provide a `ControllerPool`;
`bridle.tokenizer` provides `TextDecoder`. These interfaces contain no tensor types.
"""

from typing import TYPE_CHECKING

from bridle.deprecated_names import old_names
from bridle.engine.interfaces.controllers import DRAWN as DRAWN
from bridle.engine.interfaces.controllers import Answer as Answer
from bridle.engine.interfaces.controllers import Ask as Ask
from bridle.engine.interfaces.controllers import Capability as Capability
from bridle.engine.interfaces.controllers import Change as Change
from bridle.engine.interfaces.controllers import ControllerPool as ControllerPool
from bridle.engine.interfaces.controllers import DelegatingPool as DelegatingPool
from bridle.engine.interfaces.controllers import StoredValue as StoredValue
from bridle.engine.interfaces.controllers import ask_after as ask_after
from bridle.engine.interfaces.controllers import check_pools as check_pools
from bridle.engine.interfaces.executor import AsyncExecutor as AsyncExecutor
from bridle.engine.interfaces.executor import AsyncSampler as AsyncSampler
from bridle.engine.interfaces.executor import DeviceKVBlocks as DeviceKVBlocks
from bridle.engine.interfaces.executor import Embedder as Embedder
from bridle.engine.interfaces.executor import Executor as Executor
from bridle.engine.interfaces.executor import ExecutorInfo as ExecutorInfo
from bridle.engine.interfaces.executor import HistoryLookup as HistoryLookup
from bridle.engine.interfaces.executor import KVBlocks as KVBlocks
from bridle.engine.interfaces.executor import PendingSample as PendingSample
from bridle.engine.interfaces.executor import Sampler as Sampler
from bridle.engine.interfaces.executor import SequenceStates as SequenceStates
from bridle.engine.interfaces.executor import SupportsReconnect as SupportsReconnect
from bridle.engine.interfaces.executor import Task as Task
from bridle.engine.interfaces.executor import find_async as find_async
from bridle.engine.interfaces.executor import find_device_blocks as find_device_blocks
from bridle.engine.interfaces.executor import find_kv_blocks as find_kv_blocks
from bridle.engine.interfaces.executor import find_sequence_states as find_sequence_states
from bridle.engine.interfaces.stores import AdapterStore as AdapterStore
from bridle.engine.interfaces.stores import BatchedMedia as BatchedMedia
from bridle.engine.interfaces.stores import MediaDevice as MediaDevice
from bridle.engine.interfaces.stores import MediaStore as MediaStore
from bridle.engine.interfaces.stores import VectorStore as VectorStore
from bridle.engine.interfaces.text import TextDecoder as TextDecoder
from bridle.engine.interfaces.text import TextState as TextState

if not TYPE_CHECKING:  # to a type checker, a removed name is an error
    __getattr__ = old_names(__name__)
