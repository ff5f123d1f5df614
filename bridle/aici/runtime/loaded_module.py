"""The compiled code and the environment that a runtime's instances share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import wasmtime

from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.module_metadata import ModuleMetadata
from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.aici.runtime.wasm_calls import Crossing


@dataclass(frozen=True, slots=True)
class GuestEnvironment:
    """The environment that all instances of a runtime share. `capabilities` are the engine's capabilities: fork,
    backtrack, ff_tokens."""

    vocabulary: RuntimeVocabulary
    limits: RuntimeLimits
    capabilities: frozenset[str] = frozenset()
    timer_resolution_ns: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A compiled and linked module, with the functions that read and write the memory of its guests."""

    engine: wasmtime.Engine
    crossing: Crossing
    facts: ModuleMetadata
    pre: Any  # a wasmtime.InstancePre, or a linked component
