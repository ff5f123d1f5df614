"""Reads weights into the library's own classes, with bridle's attention. Every weight must be there, and no code or
pickle of a checkpoint is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging as library_logging

from bridle.errors import BridleError, UnsupportedModel
from bridle.model import attention
from bridle.model.checkpoint import Checkpoint


def read_weights(
    kind: Any,
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention_names: str | dict[str, str] = attention.ATTENTION_NAME,
    **options: Any,
) -> nn.Module:
    """Read the weights into the class that `kind`, one of the library's automatic ones, chooses; `options` are for that
    class."""
    attention.register()
    try:
        with _quiet_library():
            model, loading = kind.from_pretrained(
                checkpoint.folder,
                config=settings,
                dtype=dtype,
                attn_implementation=attention_names,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are refused below, with a message that names their shapes
                output_loading_info=True,
                **options,
            )
    except BridleError:
        raise
    except Exception as error:
        raise UnsupportedModel(_why_not(settings, error)) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"{checkpoint.folder} lacks {len(missing)} weights of {type(model).__name__}, among them {missing[0]!r}"
        )
    if loading["mismatched_keys"]:
        name, found, wanted = sorted(loading["mismatched_keys"])[0]
        raise UnsupportedModel(f"weight {name!r} has shape {tuple(found)}, but config.json implies {tuple(wanted)}")
    return model.requires_grad_(False).eval().to(device)  # type: ignore[no-any-return]


def _why_not(settings: PreTrainedConfig, error: Exception) -> str:
    name = settings.model_type
    if isinstance(error, KeyError) and attention.ATTENTION_NAME in str(error):
        return f"model type {name!r} brings an attention of its own that cannot be given a paged cache"
    return f"model type {name!r} cannot be loaded: {type(error).__name__}: {error}"


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Silence the library's progress bars and load reports; its findings are raised as errors here."""
    verbosity = library_logging.get_verbosity()
    bars = library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()
