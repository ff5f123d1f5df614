"""Loads guests: a Wasm engine with all permitted imports is linked to compiled code from the module store.

Only this module uses the host functions; the class `Instance`, which runs a guest, is independent of them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import wasmtime
import wasmtime.component

from bridle.aici.runtime import constraints, host, host_extensions, wasi
from bridle.aici.runtime.component import LinkedComponent, make_linker
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.loaded_module import LoadedModule
from bridle.aici.runtime.module_metadata import ModuleMetadata
from bridle.aici.runtime.wasm import make_config
from bridle.aici.runtime.wasm_calls import Crossing
from bridle.errors import InvalidRequest


class Sandbox:
    """The Wasm engine of this process, with everything that guests may import, ready to load compiled code."""

    def __init__(self, limits: RuntimeLimits) -> None:
        self.engine = wasmtime.Engine(make_config(limits, reference_types=True, parallel=False))
        self.crossing = Crossing()
        self._linkers = {old: self._link(old) for old in (False, True)}

    def load(self, path: str, facts: ModuleMetadata) -> LoadedModule:
        """Load compiled code from a file that the module store has checked."""
        if facts.is_component:
            component = wasmtime.component.Component.deserialize_file(self.engine, path)
            return LoadedModule(self.engine, self.crossing, facts, LinkedComponent(self._component_linker, component))
        module = wasmtime.Module.deserialize_file(self.engine, path)
        try:
            pre = self._linkers[facts.old_bias].instantiate_pre(module)
        except wasmtime.WasmtimeError as error:
            raise InvalidRequest(
                f"the module imports something that the runtime does not have: {error}", "module_id"
            ) from None
        return LoadedModule(self.engine, self.crossing, facts, pre)

    @cached_property
    def _component_linker(self) -> Any:
        """Return the linker for components, which is made when the first component is loaded."""
        return make_linker(self.engine)

    def _link(self, old_bias: bool) -> wasmtime.Linker:
        linker = wasmtime.Linker(self.engine)
        bias = host.BIAS_OLD if old_bias else host.BIAS_NEW
        for function in (*host.FUNCTIONS, bias, *wasi.FUNCTIONS, *constraints.FUNCTIONS, *host_extensions.FUNCTIONS):
            self.crossing.define(linker, function)
        return linker
