"""The model that sees while it is trained: a SmolVLM with random weights, step by step.

Everything is seeded, as in `lab.demo.trainer`, whose checkpoints and optimizer are used.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

from lab.demo.seeing.rows import SIDE, RowMaker, Rows, RowShape
from lab.demo.seeing.tokenizer import IMAGE, MAX_LENGTH
from lab.demo.trainer import AnyRecipe, Course

PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "do_image_splitting": False,
    "resample": 1,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""How pictures become pixels: any shape of picture is made square."""

NAMING_SHARE = 0.5
"""How much it counts that a picture's rows lie near the words for what they show. To find something by a
word is then to compare that word with itself."""


@dataclass(frozen=True, slots=True)
class SeeingRecipe(AnyRecipe):
    """All that determines the trained weights, apart from the rounding of the machine."""

    seed: int = 1
    rates: tuple[tuple[int, float], ...] = (
        (0, 0.0),
        (50, 0.02),
        (350, 0.02),
        (750, 0.0),
        (790, 0.012),
        (1250, 0.0),
        (1290, 0.016),
        (3000, 0.016),
        (4000, 0.0),
    )
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 320
    eye_size: int = 96
    eye_layers: int = 3
    eye_heads: int = 3
    eye_intermediate_size: int = 256
    patch_size: int = 12
    shape: RowShape = field(default_factory=RowShape)


class SeeingTrainer(Course[SeeingRecipe, Rows]):
    """A model, its optimizer and its place in the recipe."""

    def __init__(self, recipe: SeeingRecipe, tokenizer: PreTrainedTokenizerFast) -> None:
        """Starts at step 0 with weights drawn from the recipe's seed."""
        torch.manual_seed(recipe.seed)
        self.model = SmolVLMForConditionalGeneration(model_config(recipe, tokenizer)).to(torch.bfloat16)
        super().__init__(recipe, self.model, tokenizer)
        self._maker = RowMaker(tokenizer)

    def export(self, folder: Path) -> None:
        """Writes the model as a Hugging Face folder in bf16, and how its pictures are made ready."""
        super().export(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", encoding="utf-8")

    def _batch(self) -> Rows:
        return self._maker.make(self.recipe.shape, self.recipe.seed, self.num_done)

    def _loss(self, batch: Rows) -> torch.Tensor:
        body = self.model.model
        embeds = body.text_model.get_input_embeddings()(batch.tokens)  # (rows, length, hidden)
        seen = body.get_image_features(batch.pixels).pooler_output  # of each picture (4, hidden)
        is_image = batch.tokens == self.model.config.image_token_id
        embeds = embeds.masked_scatter(is_image.unsqueeze(-1), torch.cat(list(seen)).to(embeds.dtype))
        naming = self._naming_loss(torch.cat(list(seen)), batch.words)
        hidden = body.text_model(
            inputs_embeds=embeds, attention_mask=batch.visible, position_ids=batch.positions, use_cache=False
        ).last_hidden_state  # (rows, length, hidden)
        chosen = batch.is_target[:, 1:]
        logits = self.model.lm_head(hidden[:, :-1][chosen])  # (targets, vocabulary)
        return torch.nn.functional.cross_entropy(logits.float(), batch.tokens[:, 1:][chosen]) + NAMING_SHARE * naming

    def _naming_loss(self, seen: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """How far a picture's rows (rows, hidden) are from the words (pictures, rows of each, words) for them."""
        scaled = torch.nn.functional.rms_norm(seen, seen.shape[-1:])
        chances = self.model.lm_head(scaled).float().log_softmax(-1)  # (rows, vocabulary)
        loss: torch.Tensor = -chances.gather(1, words.flatten(0, 1)).mean() - math.log(words.shape[-1])
        return loss


def model_config(recipe: SeeingRecipe, tokenizer: PreTrainedTokenizerFast) -> SmolVLMConfig:
    """The configuration of the model."""
    eye = SmolVLMVisionConfig(
        hidden_size=recipe.eye_size,
        intermediate_size=recipe.eye_intermediate_size,
        num_hidden_layers=recipe.eye_layers,
        num_attention_heads=recipe.eye_heads,
        image_size=SIDE,
        patch_size=recipe.patch_size,
    )
    return SmolVLMConfig(
        text_config=recipe.text_config(tokenizer, len(tokenizer), MAX_LENGTH),
        vision_config=eye,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
