"""Machine code of pyctrl for the most common machines: Linux on any processor of x86-64, with none of its extensions.

CPython compiled for those runs as fast as CPython compiled for the very processor. The same bytes of the module, the
same version of the compiler and the same settings give the same code. A runtime uses it only if its own are the same.
"""

from __future__ import annotations

import ctypes

import msgspec
import wasmtime
from wasmtime import _ffi as ffi

from bridle.aici.runtime.compiler import compile_component
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.module_metadata import settings_key
from bridle.aici.runtime.wasm import make_config
from dev.controllers.rebuild import MachineCode

_MACHINES = {"x86_64-linux": ("x86_64-unknown-linux-gnu", "x86_64", "Linux")}


def machine_code(wasm: bytes) -> dict[str, MachineCode]:
    """Code by the key of the settings that it is for."""
    made = {}
    for label, (target, machine, system) in _MACHINES.items():
        config = make_config(DEFAULT_LIMITS, reference_types=True, parallel=True)
        error = ffi.wasmtime_config_target_set(config.ptr(), ctypes.create_string_buffer(target.encode()))
        if error:
            raise wasmtime.WasmtimeError._from_ptr(error)
        code, facts = compile_component(wasm, config)
        made[settings_key(DEFAULT_LIMITS, machine, system)] = MachineCode(
            label, code, msgspec.json.encode(facts).decode()
        )
    return made
