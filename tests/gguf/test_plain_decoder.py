"""Tests that bridle's own decoders, which need no transformers, compute the same as transformers' decoders."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from bridle.gguf.pointer import weights_of
from bridle.model import loader, support_checks
from bridle.model.checkpoint import Checkpoint, inspect_checkpoint
from bridle.model.hub_lookup import resolve_model
from bridle.model.plain_config import read_plain_config
from bridle.model.plain_decoder import PlainDecoder
from tests.fakes import tiny_checkpoints
from tests.gguf.kit import logits, pair
from tests.sources import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs compute the library's decoders")

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
GEMMA = {
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {**LINEAR, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CAPPED = {**GEMMA, "final_logit_softcapping": 0.5}


def _checkpoint(family: str, kind: str, changes: dict[str, Any]) -> Checkpoint:
    return inspect_checkpoint(resolve_model(str(pair(family, kind, **changes)[1])))


def _model(checkpoint: Checkpoint, settings: Any) -> nn.Module:
    return loader.read_model(checkpoint, settings, torch.float32, torch.device("cpu"))


@pytest.mark.few(7)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 16}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3_text", {}),
        ("gemma3_text", GEMMA),
        ("gemma3_text", CAPPED),
    ],
    ids=str,
)
def test_logits_are_those_of_the_library(family: str, changes: dict[str, Any], kind: str) -> None:
    checkpoint = _checkpoint(family, kind, changes)
    settings: Any = support_checks.serving_config(checkpoint)
    plain, library = _model(checkpoint, settings), _model(checkpoint, support_checks.read_config(checkpoint))
    assert isinstance(plain, PlainDecoder) and not isinstance(library, PlainDecoder)
    assert torch.equal(logits(plain), logits(library))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi3", {}),
        ("granite", {}),
        ("llama", {"rope_parameters": {**LINEAR, "rope_type": "yarn", "original_max_position_embeddings": 128}}),
    ],
    ids=str,
)
def test_other_configurations_are_the_librarys(family: str, changes: dict[str, Any]) -> None:
    checkpoint = _checkpoint(family, "F32", changes)
    assert read_plain_config(checkpoint) is None
    assert type(support_checks.serving_config(checkpoint)).__module__.startswith("transformers.")


def test_families_of_text_are_no_others() -> None:
    assert not support_checks.TEXT_FAMILIES & support_checks.multimodal_families()


def test_a_folder_is_read_by_the_library() -> None:
    folder = tiny_checkpoints.cached_checkpoint("llama")
    assert weights_of(folder) is None and read_plain_config(inspect_checkpoint(folder)) is None


_LOADS = """
import sys
from bridle.config import ModelConfig
from bridle.model import load_executor
for file in sys.argv[1:]:
    load_executor(ModelConfig(model=file))
    print("transformers" in sys.modules, "torch._dynamo" in sys.modules)
"""


def test_a_first_load_needs_no_transformers() -> None:
    files = [str(pair(family, "Q8_0")[1]) for family in ("llama", "qwen2", "qwen3", "gemma3_text")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BRIDLE_CACHE_LIMIT": "0"}
    command = [sys.executable, "-c", _LOADS, *files]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert told == "False False\n" * len(files)
