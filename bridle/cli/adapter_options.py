"""Flags for LoRA adapters, for commands that serve models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from bridle.cli.options import Bytes, Count
from bridle.config import EngineConfig

if TYPE_CHECKING:
    from bridle.http.settings import ServeSettings
    from bridle.serving.lora.lora_config import AdapterSet

_ADAPTERS = Group("Adapters", sort_key=12)


def split_at_commas(type_: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """Split the adapters in an environment variable at commas, as text-generation-inference does."""
    return [entry.strip() for entry in value.split(delimiter or ",") if entry.strip()]


@Parameter(name="*", group=_ADAPTERS)
@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters that requests may choose."""

    adapter: Annotated[
        tuple[str, ...], Parameter(negative="", env_var="LORA_ADAPTERS", env_var_split=split_at_commas)
    ] = ()
    "LoRA adapter to load at startup from a folder or the hub: [MODEL:]NAME=SOURCE[@REVISION]. Repeatable."
    adapters_dir: Path | None = None
    "Folder of adapters that clients may load by name."
    allow_adapter: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Hub id of an adapter (ID or ID@REVISION) that clients may load by name. Repeatable."
    max_step_adapters: Count = None
    "Maximum number of different adapters in one step. Requests for further adapters wait. Default: 64."
    adapter_memory: Bytes = None
    """Memory for adapters in use, such as `2GiB`. The KV cache leaves this memory free, and `--max-model-memory`
    includes it. Default: 1GiB, or an eighth of the free memory if that is less."""
    adapter_host_memory: Bytes = None
    """Host memory for loaded adapters. On a CPU it also reduces the KV cache. Default: 4GiB, or an eighth of the free
    memory if that is less."""

    def add_to(self, settings: ServeSettings) -> ServeSettings:
        """Return the settings of a server with these adapters and limits."""
        return replace(settings, adapters=self.to_set(), engine=self.limit(settings.engine))

    def to_set(self) -> AdapterSet:
        from bridle.serving.lora.lora_config import AdapterSet, parse_adapters

        return AdapterSet(parse_adapters(self.adapter), self.adapters_dir, self.allow_adapter)

    def limit(self, engine: EngineConfig) -> EngineConfig:
        """Return the settings of an engine with these limits on adapters."""
        names = ("max_step_adapters", "adapter_memory", "adapter_host_memory")
        given = {name: getattr(self, name) for name in names}
        return replace(engine, **{name: value for name, value in given.items() if value is not None})
