"""Metadata that the compiler finds out about a module. The metadata is stored with the compiled code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform

import msgspec

from bridle.aici.runtime.limits import RuntimeLimits

WASMTIME_VERSION = importlib.metadata.version("wasmtime")


class ModuleMetadata(msgspec.Struct, frozen=True):
    """Metadata of a module. `layout` is the layout of the module's token trie: 1 has 8 length bits, 2 has 10. If
    `problem` is not empty, it says why the module cannot be instantiated as a controller."""

    dialect: int = 2
    layout: int = 2
    old_bias: bool = False
    is_component: bool = False
    is_copyable: bool = True
    has_start: bool = False
    prefix: str = ""
    num_globals: int = 0
    problem: str = ""


def settings_key(limits: RuntimeLimits, machine: str = platform.machine(), system: str = platform.system()) -> str:
    """Return a key for all settings that affect compiled code. The key is part of the compiled code's name in the
    cache."""
    facts = ("exports-1", WASMTIME_VERSION, machine, system, limits.max_wasm_stack)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
