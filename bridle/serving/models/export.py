"""`bridle quantize`: writes a checkpoint with fewer bits per weight, as a GGUF file or as a folder with 8-bit weights.

The model is read with the class that the transformers library has for its architecture. So every folder that can be
served is written in transformers' own format, even if another program saved it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.gguf.vocabulary_writer import VocabularyFields, vocabulary_fields
from bridle.gguf.writer import FILE_TYPES, family_to_write, write_gguf
from bridle.model import loader, support_checks
from bridle.model.checkpoint import Checkpoint, inspect_checkpoint
from bridle.model.hub_lookup import resolve_model
from bridle.model.quantization.saving import save_int8
from bridle.tokenizer.tokenizer_files import load_fast_tokenizer

Progress = Callable[[str, float], None]

#: All types that can be written: GGUF files, and a folder in 8 bits.
TYPES = (*FILE_TYPES, "int8")


def quantize_model(
    model: str, out: Path, kind: str, revision: str | None = None, progress: Progress = lambda what, share: None
) -> Path:
    """Write `model` to `out` with weights of type `kind`. Returns the written path. Raises `InvalidRequest` or
    `UnsupportedModel`."""
    if kind not in TYPES:
        raise InvalidRequest(f"type is {kind!r}; must be one of {', '.join(TYPES)}", "type")
    if out.exists():
        raise InvalidRequest(f"{out} exists already and is not overwritten; choose another file", "out")
    checkpoint = inspect_checkpoint(resolve_model(model, revision, lambda share: progress("downloading", share)))
    if checkpoint.gguf is not None:
        raise UnsupportedModel(f"{checkpoint.gguf.path} is a GGUF file already; quantize the original checkpoint")
    if "quantization_config" in checkpoint.config:
        raise UnsupportedModel(f"{model} is quantized already; quantize the original checkpoint")
    settings = support_checks.read_config(checkpoint)
    if support_checks.takes_media(settings):
        raise UnsupportedModel(f"{model} takes images or sound; only text models can be written as quantized files")
    progress("reading weights", 0.0)
    loaded = loader.read_model(checkpoint, settings, _own_dtype(settings), torch.device("cpu"))
    if kind == "int8":
        return save_int8(checkpoint, loaded, out, lambda share: progress("rounding to 8 bits", share))
    return _write_file(checkpoint, loaded, out, kind, model, lambda share: progress(f"writing {kind}", share))


def _own_dtype(settings: Any) -> torch.dtype:
    """Return the number type of the checkpoint. With this number type, the model is read without loss, and often in
    less memory than with float32."""
    return settings.dtype if isinstance(settings.dtype, torch.dtype) else torch.float32


def _write_file(
    checkpoint: Checkpoint, model: nn.Module, out: Path, kind: str, name: str, progress: Callable[[float], None]
) -> Path:
    config: Any = model.config
    family_to_write(config.model_type)
    fields = read_vocabulary_fields(checkpoint, config.vocab_size)
    if out.suffix.lower() != ".gguf":
        raise InvalidRequest(f"out is {str(out)!r}; the name of a GGUF file must end in .gguf", "out")
    tensors = dict(model.state_dict())  # includes buffers for the choice of experts, which are no parameters
    write_gguf(out, config, tensors, fields, kind, Path(name).name, progress)
    return out


def read_vocabulary_fields(checkpoint: Checkpoint, num_rows: int) -> VocabularyFields:
    """Return the tokenizer of a checkpoint as fields of a GGUF file."""
    loaded = load_fast_tokenizer(checkpoint.folder)
    spec = json.loads(loaded.backend_tokenizer.to_str())
    roles = {role: str(token) for role, token in loaded.special_tokens_map.items() if token}
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return vocabulary_fields(spec, roles, num_rows, template)
