"""An architecture of GGUF files and the family of the library that it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bridle.gguf.fields import Field
from bridle.gguf.rules import TensorRule

#: How files describe attention: as usual; as one vector per token, see `bridle.gguf.mla`; with sizes that differ from
#: layer to layer, see `bridle.gguf.mixed_layers` and `bridle.gguf.varied_layers`; or not at all, if a model has none.
Layout = Literal["", "latent", "mixed", "varied", "paired kinds", "whole latent", "none"]
#: A field with the kind of each layer, and the tensors by which kinds are known.
Kinds = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture: the library's name of it, its tensors, and its further properties."""

    arch: str
    model_type: str
    rules: tuple[TensorRule, ...]
    layer_norm: str = ""  # the configuration's field, if norms are not RMS norms
    norm_field: str = "rms_norm_eps"  # the same if they are
    norm_eps: float = 0.0  # of layer norms, if the library has it as a constant
    reads: tuple[str, ...] = ()  # names of the further properties: see `bridle.gguf.traits`
    fields: tuple[Field, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()  # fields with one value in all files
    lacks: frozenset[str] = frozenset()  # common keys that its files do not have, or in another form
    kinds: tuple[Kinds, ...] = ()
    lists_heads: bool = False  # files have the number of key heads of each layer, 0 where there is no attention
    layout: Layout = ""
    is_alias: bool = False  # files of it are read as another architecture's model, and not written

    @property
    def has_rotation(self) -> bool:
        return self.layout not in ("mixed", "none") and "rope" not in self.lacks
