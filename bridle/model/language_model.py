"""The text part of a model that also takes images or sound, as a model of its own: the same logits for text, and a
place where features of these go in.

Embedding, layers and head are those of the whole model, which is kept: its tower turns images into features. What
follows here (geometry, lean layers, forms of weights, adapters) sees the text part alone, so the tower stays as the
library made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bridle.errors import UnsupportedModel
from bridle.model.attention import ATTENTION_NAME
from bridle.model.support_checks import HEARING_FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Which attention each part of such a model is loaded with: ours is for tokens with a cache.
PARTS = {"text_config": ATTENTION_NAME, "vision_config": "sdpa", "audio_config": "sdpa"}


def class_of(settings: PreTrainedConfig) -> Any:
    """Return the library's class for such a model."""
    if settings.model_type in HEARING_FAMILIES:
        from transformers import VoxtralForConditionalGeneration

        return VoxtralForConditionalGeneration
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText


class LanguageModel(nn.Module):
    """Embedding, layers and head of `whole`, a model of images and text."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        inner = whole.model
        body = getattr(inner, "language_model", None) or getattr(inner, "text_model", None)
        if body is None or not isinstance(getattr(whole, "lm_head", None), nn.Module):
            raise UnsupportedModel(f"{type(whole).__name__} has no language model under a name that is known")
        self.config = whole.config.get_text_config()
        self.model = body
        self.lm_head = whole.lm_head
        vars(self)["inner"] = inner  # the whole without its head; no module of this one: see above
        # Most families that take images leave the cap of their text part's own class out.
        has_cap = whole.config.model_type == "paligemma"
        self._logits_cap = getattr(self.config, "final_logit_softcapping", None) if has_cap else None

    @property
    def inner(self) -> Any:
        """The whole model without its head."""
        return vars(self)["inner"]

    @property
    def num_mutual_rows(self) -> int:
        """Number of rows of an image if they attend to each other in both directions; else 0."""
        settings = self.inner.config
        if settings.model_type == "paligemma":
            return int((settings.vision_config.image_size // settings.vision_config.patch_size) ** 2)
        return int(settings.mm_tokens_per_image) if settings.model_type == "gemma3" else 0

    @property
    def device(self) -> Any:
        return self.get_input_embeddings().weight.device

    @property
    def base_model(self) -> nn.Module:
        found: nn.Module = self.model
        return found

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.model.get_input_embeddings()
        return found

    def get_output_embeddings(self) -> nn.Module:
        found: nn.Module = self.lm_head
        return found

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def rest(self) -> Iterator[nn.Module]:
        """The modules that only images need."""
        mine = {id(module) for module in self.modules()}
        yield from (module for module in self.inner.modules() if id(module) not in mine)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **extra: Any,
    ) -> SimpleNamespace:
        """Ids [1, T], or rows [1, T, hidden] in their place -> `logits` [1, T or R, V]."""
        rows = self.model(
            input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=use_cache, **extra
        ).last_hidden_state
        logits = self.lm_head(rows if logits_to_keep is None else rows[:, logits_to_keep])
        if self._logits_cap is not None:
            logits = torch.tanh(logits / self._logits_cap) * self._logits_cap
        return SimpleNamespace(logits=logits)
