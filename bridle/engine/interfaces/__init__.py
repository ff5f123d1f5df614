"""The protocols of the engine's neighbours: what computes, what steers, what keeps adapters, and what turns tokens into
text.

The engine is written against these protocols alone. `bridle.model` (torch), `bridle.testing` (scripted) and any other
backend implement `Executor`; plain Python objects, constraints and the Wasm runtime each bring a `ControllerPool`;
`bridle.text` brings `TextDecoder`. No tensor type appears here.
"""

from __future__ import annotations

from bridle.engine.interfaces.controllers import (
    Answer,
    Ask,
    Change,
    ControllerPool,
    ForesightedPool,
    ForetoldPool,
    GuidingPool,
    LeadingPool,
    ModulePool,
    StoredValue,
    foresees,
    guides,
    is_foretold,
    leads,
)
from bridle.engine.interfaces.executor import (
    Embedder,
    Executor,
    ExecutorInfo,
    Interruptible,
    LateExecutor,
    Task,
    find_late,
)
from bridle.engine.interfaces.sampler import Drawing, EarlySampler, HistoryLookup, Sampler
from bridle.engine.interfaces.stores import AdapterStore, BatchedMedia, MediaDevice, MediaStore
from bridle.engine.interfaces.text import TextDecoder, TextState

__all__ = [
    "AdapterStore",
    "Answer",
    "Ask",
    "BatchedMedia",
    "Change",
    "ControllerPool",
    "Drawing",
    "EarlySampler",
    "Embedder",
    "Executor",
    "ExecutorInfo",
    "ForesightedPool",
    "ForetoldPool",
    "GuidingPool",
    "HistoryLookup",
    "Interruptible",
    "LateExecutor",
    "LeadingPool",
    "MediaDevice",
    "MediaStore",
    "ModulePool",
    "Sampler",
    "StoredValue",
    "Task",
    "TextDecoder",
    "TextState",
    "find_late",
    "foresees",
    "guides",
    "is_foretold",
    "leads",
]
