"""Finds the model that a name of Ollama's kind means: `:latest` may follow, and other names of a pulled model count."""

from __future__ import annotations

from bridle.errors import UnknownModel
from bridle.model.library import find_entry
from bridle.serving import ModelRegistry


def served_name(registry: ModelRegistry, name: str | None) -> str | None:
    """Return the name under which the registry knows a model. Any other name, such as an adapter's, stays unchanged."""
    if not name:
        return None
    entry = find_entry(name)
    for each in (name, name.removesuffix(":latest"), entry.name if entry is not None else name):
        try:
            registry.slot_of(each)
        except UnknownModel:
            continue
        return each
    return name
