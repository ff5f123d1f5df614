"""The protocols of the engine's neighbours: executors, controllers, stores of adapters, and text decoders.

The engine is written against these protocols alone. `bridle.model` (torch), `bridle.testing` (scripted) and any other
backend implement `Executor`; plain Python objects, constraints and the Wasm runtime each bring a `ControllerPool`;
`bridle.tokenizer` brings `TextDecoder`. No tensor type appears here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.deprecated_names import old_names
from bridle.engine.interfaces.controllers import (
    DRAWN,
    Answer,
    Ask,
    Capability,
    Change,
    ControllerPool,
    DelegatingPool,
    StoredValue,
    ask_after,
    check_pools,
)
from bridle.engine.interfaces.executor import (
    AsyncExecutor,
    DeviceKVBlocks,
    Embedder,
    Executor,
    ExecutorInfo,
    KVBlocks,
    SequenceStates,
    SupportsReconnect,
    Task,
    find_async,
    find_device_blocks,
    find_kv_blocks,
    find_sequence_states,
)
from bridle.engine.interfaces.sampler import AsyncSampler, HistoryLookup, PendingSample, Sampler
from bridle.engine.interfaces.stores import AdapterStore, BatchedMedia, MediaDevice, MediaStore, VectorStore
from bridle.engine.interfaces.text import TextDecoder, TextState

__all__ = [
    "AdapterStore",
    "Answer",
    "Ask",
    "BatchedMedia",
    "Capability",
    "Change",
    "DRAWN",
    "ControllerPool",
    "PendingSample",
    "AsyncSampler",
    "Embedder",
    "Executor",
    "ExecutorInfo",
    "HistoryLookup",
    "DeviceKVBlocks",
    "KVBlocks",
    "SequenceStates",
    "SupportsReconnect",
    "AsyncExecutor",
    "MediaDevice",
    "MediaStore",
    "DelegatingPool",
    "Sampler",
    "StoredValue",
    "Task",
    "TextDecoder",
    "TextState",
    "check_pools",
    "find_async",
    "find_device_blocks",
    "find_kv_blocks",
    "find_sequence_states",
    "VectorStore",
    "ask_after",
]

if not TYPE_CHECKING:  # to a type checker, a name that is gone is an error
    __getattr__ = old_names(__name__)
