"""The description of one architecture of GGUF files and its model family in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bridle.gguf.fields import Field
from bridle.gguf.rules import TensorRule

#: The way in which files describe attention: as usual; as one vector per token, see `bridle.gguf.mla`; with sizes that
#: differ between layers, see `bridle.gguf.mixed_layers` and `bridle.gguf.varied_layers`; or not at all, if a model has
#: no attention.
Layout = Literal["", "latent", "mixed", "varied", "paired kinds", "whole latent", "none"]
#: A field with the kind of each layer, and the tensors that show the kind of a layer.
Kinds = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A GGUF architecture: its model type in transformers, the rules for its tensors, and its further properties."""

    arch: str
    model_type: str
    rules: tuple[TensorRule, ...]
    layer_norm: str = ""  # the configuration's field, if norms are not RMS norms
    norm_field: str = "rms_norm_eps"  # the configuration's field for RMS norms
    norm_eps: float = 0.0  # of layer norms, if transformers has a constant
    reads: tuple[str, ...] = ()  # names of the further properties: see `bridle.gguf.traits`
    fields: tuple[Field, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()  # fields with one value in all files
    lacks: frozenset[str] = frozenset()  # common keys that its files lack, or store in another form
    kinds: tuple[Kinds, ...] = ()
    lists_heads: bool = False  # files have the number of key heads of each layer, 0 for layers without attention
    layout: Layout = ""
    is_alias: bool = False  # files of it are read as another architecture, and never written

    @property
    def has_rotation(self) -> bool:
        return self.layout not in ("mixed", "none") and "rope" not in self.lacks
