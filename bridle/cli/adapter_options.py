"""Flags about LoRA adapters, for the commands that serve models."""

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
    """The entries of an environment variable, as text-generation-inference writes lists of adapters."""
    return [entry.strip() for entry in value.split(delimiter or ",") if entry.strip()]


@Parameter(name="*", group=_ADAPTERS)
@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters that requests may choose."""

    adapter: Annotated[
        tuple[str, ...], Parameter(negative="", env_var="LORA_ADAPTERS", env_var_split=split_at_commas)
    ] = ()
    "[MODEL:]NAME=SOURCE[@REVISION]: an adapter, loaded at the start from a folder or hub id; may be repeated."
    adapters_dir: Path | None = None
    "Folder whose adapter folders may be loaded by name."
    allow_adapter: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Hub id of an adapter (or ID@REVISION) that may be fetched and loaded by name; may be repeated."
    max_step_adapters: Count = None
    "Most distinct adapters that one step computes with; more take turns. Default: 64."
    adapter_memory: Bytes = None
    (
        "Memory for the adapters that steps compute with (`2GiB` works); the KV cache leaves it free, and "
        "`--max-model-memory` counts it. Default: 1GiB, or an eighth of what is free if that is less."
    )
    adapter_host_memory: Bytes = None
    (
        "Memory of the host for adapters that were read; on a CPU it is the same memory, and is counted likewise. "
        "Default: 4GiB, or an eighth of what is free if that is less."
    )

    def add_to(self, settings: ServeSettings) -> ServeSettings:
        """The settings of a server, with these adapters."""
        return replace(settings, adapters=self.to_set(), engine=self.limit(settings.engine))

    def to_set(self) -> AdapterSet:
        from bridle.serving.lora.lora_config import AdapterSet, parse_adapters

        return AdapterSet(parse_adapters(self.adapter), self.adapters_dir, self.allow_adapter)

    def limit(self, engine: EngineConfig) -> EngineConfig:
        """The settings of an engine, with these limits."""
        names = ("max_step_adapters", "adapter_memory", "adapter_host_memory")
        given = {name: getattr(self, name) for name in names}
        return replace(engine, **{name: value for name, value in given.items() if value is not None})
