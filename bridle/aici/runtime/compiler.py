"""Compiles Wasm modules. Only this Python module passes the bytes of an upload to the Wasm compiler.

A malicious module can make a compiler work hard. So each module has its own compiler process, with limited memory and
with a time limit that the supervisor enforces. The compiler returns machine code and the metadata that workers need:
the guest's dialect, missing exports, and whether an instance can be copied.
"""

from __future__ import annotations

import os
import resource
from typing import Any

import wasmtime
import wasmtime.component

from bridle.aici.runtime import wasm_binary
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.module_metadata import ModuleMetadata
from bridle.aici.runtime.wasm import make_config
from bridle.cgroups import num_cores
from bridle.errors import InvalidRequest

_COMMON = ("aici_init", "aici_create", "aici_init_prompt", "aici_mid_process")
_PHASES = ("aici_pre_process", "aici_post_process")


def compile_module(wasm: bytes, limits: RuntimeLimits) -> tuple[bytes, ModuleMetadata]:
    """Compile a module. Returns machine code and metadata. Raises `InvalidRequest` with the compiler's message."""
    try:
        if wasm_binary.is_component(wasm):
            return compile_component(wasm, make_config(limits, reference_types=True, parallel=True))
        return _compile_core(wasm, limits)
    except (wasmtime.WasmtimeError, IndexError) as error:
        raise InvalidRequest(f"the file is not a usable WebAssembly module: {str(error)[:2000]}", "binary") from None


def cap_resources(limits: RuntimeLimits) -> None:
    """Limit this process's memory and time, before the compiler reads a module. Memory that is already mapped does not
    count."""
    os.environ["RAYON_NUM_THREADS"] = str(min(num_cores(), 4))  # each thread maps memory of its own
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    allowed = mapped + limits.max_compile_memory
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = max(limits.max_compile_time * 4 // 1000, 1)  # CPU seconds, over all of its threads
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _compile_core(wasm: bytes, limits: RuntimeLimits) -> tuple[bytes, ModuleMetadata]:
    engine = wasmtime.Engine(make_config(limits, reference_types=True, parallel=True))
    wasmtime.Module.validate(engine, wasm)
    rewritten = wasm_binary.expose_state(wasm)
    module = wasmtime.Module(engine, rewritten.wasm)
    facts = _facts(module, rewritten, _is_valid_without_references(wasm, limits))
    return bytes(module.serialize()), facts


def compile_component(wasm: bytes, config: wasmtime.Config) -> tuple[bytes, ModuleMetadata]:
    """Compile a component with this configuration of wasmtime. Returns machine code and metadata."""
    component = wasmtime.component.Component(wasmtime.Engine(config), wasm)
    return bytes(component.serialize()), ModuleMetadata(is_component=True, is_copyable=False)


def _is_valid_without_references(wasm: bytes, limits: RuntimeLimits) -> bool:
    """Return whether the module is valid without reference types; if so, it has no `table.set`."""
    engine = wasmtime.Engine(make_config(limits, reference_types=False, parallel=False))
    try:
        wasmtime.Module.validate(engine, wasm)
    except wasmtime.WasmtimeError:
        return False
    return True


def _facts(module: wasmtime.Module, rewritten: wasm_binary.Rewritten, is_plain: bool) -> ModuleMetadata:
    functions: dict[str, Any] = {
        item.name: item.type for item in module.exports if isinstance(item.type, wasmtime.FuncType)
    }
    dialect = 1 if all(name in functions for name in _PHASES) else 2
    old_bias = _has_old_bias(module)
    has_memory = any(item.name == "memory" and isinstance(item.type, wasmtime.MemoryType) for item in module.exports)
    return ModuleMetadata(
        dialect=dialect,
        layout=1 if dialect == 1 or old_bias else 2,
        old_bias=old_bias,
        is_copyable=rewritten.is_copyable and is_plain,
        has_start=rewritten.has_start,
        prefix=rewritten.prefix,
        num_globals=rewritten.num_globals,
        problem=_problem(functions, dialect, has_memory),
    )


def _has_old_bias(module: wasmtime.Module) -> bool:
    for item in module.imports:
        if (item.module, item.name) == ("env", "aici_host_return_logit_bias"):
            return isinstance(item.type, wasmtime.FuncType) and not item.type.results
    return False


def _problem(functions: dict[str, Any], dialect: int, has_memory: bool) -> str:
    needed = {name: 0 if name in ("aici_init", "aici_create") else 1 for name in _COMMON}
    if dialect == 1:
        needed.update(dict.fromkeys(_PHASES, 1))
    for name, count in needed.items():
        kind = functions.get(name)
        if kind is None:
            return f"the module does not export the function {name}"
        results = 1 if name == "aici_create" else 0
        types = [str(t) for t in (*kind.params, *kind.results)]
        if (len(kind.params), len(kind.results)) != (count, results) or any(t != "i32" for t in types):
            return f"the module's export {name} has the wrong type"
    return "" if has_memory else "the module does not export its memory as 'memory'"
