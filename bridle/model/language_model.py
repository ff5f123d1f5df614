"""The text part of a multimodal model, as a separate model. The text part gives the same logits for text, and takes
features of images or sound as input rows. The text part shares embedding, layers and output head with the whole model.
The whole multimodal model is kept, because its tower turns images into features. Later changes, such as lean layers,
weight formats and adapters, apply to the text part only; the tower stays as transformers made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bridle.errors import UnsupportedModel
from bridle.model.attention import ATTENTION_NAME
from bridle.model.checkpoint import Checkpoint
from bridle.model.support_checks import HEARING_FAMILIES, VISION_FAMILIES
from bridle.model.weight_reading import read_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Maximum rows of an image of Gemma 4, unless the checkpoint's image processor has another number.
_GEMMA4_ROWS = 280
#: The attention of each part of a model whose towers are used. bridle's attention is only for tokens with a cache.
_PARTS = {"text_config": ATTENTION_NAME, "vision_config": "sdpa", "audio_config": "sdpa"}


def read_language_model(
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> LanguageModel:
    """Read the weights of a multimodal model, and return its text part."""
    from transformers import AutoModelForMultimodalLM

    names = attention_names(settings)
    return LanguageModel(
        read_weights(
            AutoModelForMultimodalLM, checkpoint, settings, dtype, device, attention_names=names, progress=progress
        )
    )


def attention_names(settings: PreTrainedConfig) -> dict[str, str]:
    """Return the name of the attention function for each part of a model. Also change the configuration so that the
    text part attends causally."""
    _attend_causally(settings.get_text_config(decoder=True))
    if settings.model_type in HEARING_FAMILIES:
        return _PARTS
    # Some towers for sound support only `eager`.
    return _PARTS | {"audio_config": "eager"} if settings.model_type in VISION_FAMILIES else _names_of_parts(settings)


def _attend_causally(text: Any) -> None:
    """Make the text part attend causally even if the configuration declares bidirectional attention. Each prompt states
    the ranges of image tokens that attend to each other."""
    value = getattr(text, "use_bidirectional_attention", None)
    if isinstance(value, bool):  # PaliGemma
        text.use_bidirectional_attention = False


def _names_of_parts(settings: PreTrainedConfig) -> dict[str, str]:
    """Return the attention function for each part of a model of which only the text part is used. The towers (encoders
    of images or sound) get `eager`, because some towers support no other function."""
    text = settings.get_text_config(decoder=True)
    names = {
        part: ATTENTION_NAME if getattr(settings, part, None) is text else "eager" for part in settings.sub_configs
    }
    return {"": ATTENTION_NAME if text is settings else "eager", **names}


class LanguageModel(nn.Module):
    """The embedding, layers and output head of `whole`, a multimodal model of transformers."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        body, head = _body_of(whole), whole.get_output_embeddings()
        if body is None or not isinstance(head, nn.Module):
            raise UnsupportedModel(f"{type(whole).__name__} has no language model under a known attribute name")
        self.config = whole.config.get_text_config(decoder=True)
        self.model = body
        self.lm_head = head
        vars(self)["whole"] = whole  # not registered as a submodule, because it contains the parts of this module
        routes = "moe_mm_token_type_ids" in signature(body.forward).parameters
        #: The ids of image tokens and of tokens around images, which use separate experts.
        self._visual_ids = sorted(self._ids_named("image_", "video_")) if routes else []
        self._logits_scale, self._logits_cap = 1.0, None
        is_known = whole.config.model_type in VISION_FAMILIES | HEARING_FAMILIES
        if whole.config.model_type == "paligemma":  # older releases of transformers leave the cap out
            self._logits_cap = getattr(self.config, "final_logit_softcapping", None)
        elif not is_known or len(list(_ways(self.config))) > 1:
            self._fit_head()

    def _fit_head(self) -> None:
        """Find out by a trial pass whether the whole model scales or soft-caps its logits."""
        self.set_attn_implementation("eager")
        found = [token for token in range(3, 128) if token not in self.media_ids][:4]
        ids = torch.tensor([found]).to(self.device)  # [1, 4]
        try:
            with torch.inference_mode():
                wanted = self.whole(input_ids=ids, use_cache=False).logits.float()
                plain = self(input_ids=ids).logits.float()
        except Exception as error:
            raise UnsupportedModel(
                f"{type(self.whole).__name__} cannot run on text without images: {type(error).__name__}: {error}"
            ) from error
        finally:
            self.set_attn_implementation(ATTENTION_NAME)
        errors = {way: float((_finished(plain, *way) - wanted).abs().max()) for way in _ways(self.config)}
        self._logits_scale, self._logits_cap = min(errors, key=errors.__getitem__)

    @property
    def whole(self) -> Any:
        """Return the multimodal model of transformers."""
        return vars(self)["whole"]

    @property
    def media_ids(self) -> frozenset[int]:
        """Return the ids of tokens that stand for images or sounds, or that mark their begin and end."""
        return self._ids_named("")

    def _ids_named(self, *begins: str) -> frozenset[int]:
        """Return the token ids in those configuration fields whose names begin with one of `begins`."""
        fields = ((name, value) for name, value in vars(self.whole.config).items() if name.startswith(begins))
        return frozenset(
            value for name, value in fields if isinstance(value, int) and name.endswith(("_token_id", "_token_index"))
        )

    @property
    def inner(self) -> Any:
        """Return the whole multimodal model without its output head."""
        return getattr(self.whole, "model", self.whole)

    @property
    def num_mutual_rows(self) -> int:
        """Return the number of rows of an image if these rows attend to each other in both directions; otherwise 0."""
        settings = self.inner.config
        if settings.model_type == "paligemma":
            return int((settings.vision_config.image_size // settings.vision_config.patch_size) ** 2)
        if settings.model_type == "gemma4":
            return _GEMMA4_ROWS if self.config.use_bidirectional_attention == "vision" else 0
        return int(settings.mm_tokens_per_image) if settings.model_type == "gemma3" else 0

    @property
    def sees_locally(self) -> bool:
        """Return whether the rows of an image attend to later rows only within the window of layers that have a sliding
        window."""
        return bool(self.inner.config.model_type == "gemma4")

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
        """Yield the modules of the whole model that are outside of the text part, such as towers."""
        mine = {id(module) for module in self.modules()}
        yield from (module for module in self.inner.modules() if id(module) not in mine)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        places: Tensor | None = None,
        **extra: Any,
    ) -> SimpleNamespace:
        """Run the layers and the output head. Inputs are ids [1, T], or embedded rows [1, T, hidden] with image
        features at `places` [N]. Returns an object with `logits` [1, T or R, V]."""
        if self._visual_ids and input_ids is not None and not _is_captured(input_ids):
            are_visual = reduce(torch.logical_or, (input_ids == each for each in self._visual_ids))
            extra["moe_mm_token_type_ids"] = are_visual.int()
        has_further = bool(getattr(self.config, "hidden_size_per_layer_input", 0) or 0)
        if places is not None and input_ids is not None and has_further:  # Gemma 4
            ids = input_ids.index_fill(1, places, self.config.pad_token_id)
            extra["per_layer_inputs"] = self.model.get_per_layer_inputs(ids)
        input_ids = input_ids if inputs_embeds is None else None
        rows = self.model(
            input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=use_cache, **extra
        ).last_hidden_state
        logits = self.lm_head(rows if logits_to_keep is None else rows[:, logits_to_keep])
        return SimpleNamespace(logits=_finished(logits, self._logits_scale, self._logits_cap))


def _is_captured(ids: Tensor) -> bool:
    """Return whether a CUDA graph of the step is being captured. A step that is captured has no image tokens."""
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()


def _body_of(whole: Any) -> Any:
    """Return the module with the text embedding and layers; None if it is not under a known name."""
    inner = getattr(whole, "model", whole)
    for name in ("language_model", "text_model"):
        if (found := getattr(inner, name, None)) is not None:
            body = found.base_model
            return body.model if hasattr(body, "lm_head") else body  # some modules hold a head, too
    has_parts = whole.config.get_text_config(decoder=True) is not whole.config
    return None if inner is whole or has_parts else inner


def _ways(config: Any) -> Iterator[tuple[float, float | None]]:
    """Yield the possible pairs of logits scale and soft-cap for a configuration, including no scale and no cap."""
    scales = [1.0, *(getattr(config, name, None) for name in ("logit_scale", "output_multiplier"))]
    scales += [1 / value for value in [getattr(config, "logits_scaling", None)] if value]
    caps = [None, getattr(config, "final_logit_softcapping", None)]
    yield from ((scale, cap) for scale in scales if scale for cap in dict.fromkeys(caps))


def _finished(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    if scale != 1.0:
        logits = logits * scale
    return logits if cap is None else torch.tanh(logits / cap) * cap
