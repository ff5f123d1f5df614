"""Make a tiny random checkpoint that takes audio: a Hugging Face folder, with the file that says how sounds become
model input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes import tiny_checkpoints, vision_checkpoints
from tests.fakes.made_once import made_once

#: What stands for a row of a sound, the last of the vocabulary, and before the first.
NAMES = ("[AUDIO]", "[BEGIN_AUDIO]")
AUDIO = tiny_checkpoints.VOCAB_SIZE - 1
#: Samples of a piece, and the rows that stand for one.
RATE, PIECE, ROWS = 16_000, 16 * 160, 4
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 8,
}
_SETTINGS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "sampling_rate": RATE}


@made_once
def make_hearing(folder: Path, *, seed: int = 0, **overrides: Any) -> None:
    """Write a Voxtral checkpoint into `folder`. `overrides` replace fields of its text configuration."""
    from transformers import AutoConfig, VoxtralForConditionalGeneration
    from transformers.utils import logging

    text = {"model_type": "llama", **vision_checkpoints.TEXT, **overrides}
    config = AutoConfig.for_model("voxtral", text_config=text, audio_config=_TOWER, audio_token_id=AUDIO)
    model = VoxtralForConditionalGeneration(config)
    tiny_checkpoints.randomize(model, seed)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_SETTINGS))
    tiny_checkpoints.save_tokenizer(folder)
    vision_checkpoints.name_tokens(folder, NAMES, "audio")
