"""Flags about LoRA adapters, for the commands that serve models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from bridle.service.adapter_set import AdapterSet

_ADAPTERS = Group("Adapters", sort_key=12)


def split_at_commas(type_: Any, value: str) -> list[str]:
    """The entries of an environment variable, as text-generation-inference writes lists of adapters."""
    return [entry.strip() for entry in value.split(",") if entry.strip()]


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

    def to_set(self) -> AdapterSet:
        from bridle.service.adapter_set import AdapterSet, parse_adapters

        return AdapterSet(parse_adapters(self.adapter), self.adapters_dir, self.allow_adapter)
