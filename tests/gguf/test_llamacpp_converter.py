"""Tests that files written by llama.cpp's own converter from tiny checkpoints give the checkpoints' logits.

`BRIDLE_LLAMACPP_SOURCES` names the folder with llama.cpp's sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import tiny_checkpoints
from tests.gguf.kit import NEEDED, load, logits
from tests.gguf.later_models import EXPERTS, OLDER, RECURRENT

SOURCES = Path(os.environ.get("BRIDLE_LLAMACPP_SOURCES", os.devnull))
#: The converter knows tokenizers by the tokens of a text, and not the tiny one.
_SCRIPT = """
import json, sys
from pathlib import Path
import torch, transformers
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
import gguf, conversion
from conversion.base import ModelBase, ModelType, TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
with torch.inference_mode():
    for folder in map(Path, json.loads(sys.argv[2])):
        name = conversion.get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
        kind = conversion.get_model_class(name, mmproj=False)
        kind.set_vocab, kind.no_mtp = TextModel._set_vocab_gpt2, True
        kind(folder, gguf.LlamaFileType.ALL_F32, folder.with_suffix(".gguf"), eager=True).write()
"""
#: Earlier families that need no further fields.
_CONVERTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "granite", "gpt_oss", "deepseek_v3", "olmo2")
#: Fields that published configurations of a family, or of one model, have and the library leaves out when it saves one.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_rotary_emb": 4},
    "deepseek_v3": {"scoring_func": "sigmoid"},
    "exaone_moe": {"scoring_func": "sigmoid"},
    "falcon_7b": {"num_kv_heads": 1},
    "glm": {"layernorm_epsilon": 1.5625e-07},
    "gpt2": {"n_ctx": 512},
    "granite_swa": {"no_rope_layers": [1, 0, 1]},
    "mpt": {"architectures": ["MPTForCausalLM"]},
}
_MODELS = {name: (name, NEEDED.get(name, {})) for name in _CONVERTED} | RECURRENT | EXPERTS | OLDER
#: Those of which a published checkpoint has other names of weights, layers or fields than the library saves.
_LEFT_OUT = frozenset(
    {"hy_v4", "phimoe", "gpt_neox", "pythia_halves", "granite_h", "kimi_linear", "ling", "mimo_v2_flash"}
)
NAMES = sorted(_MODELS.keys() - _LEFT_OUT)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert all models in one process; return the folder with their files."""
    pytest.importorskip("sentencepiece")  # which the converter imports
    root = tmp_path_factory.mktemp("converted")
    for name in NAMES:
        family, fields = _MODELS[name]
        folder = Path(shutil.copytree(tiny_checkpoints.cached_checkpoint(family, **fields), root / name))
        config = json.loads((folder / "config.json").read_text()) | _PUBLISHED.get(name, _PUBLISHED.get(family, {}))
        (folder / "config.json").write_text(json.dumps(config))
    folders = json.dumps([str(root / name) for name in NAMES])
    command = [sys.executable, "-c", _SCRIPT, str(SOURCES), folders]
    subprocess.run(command, check=True, timeout=600)
    return root


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES.is_dir(), reason="BRIDLE_LLAMACPP_SOURCES names no folder of llama.cpp's sources")
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_file_gives_the_logits_of_the_folder(name: str, converted: Path) -> None:
    want = logits(load(converted / name))
    have = logits(load(converted / f"{name}.gguf"))
    assert float((want - have).abs().max()) <= 2e-5 * float(want.abs().max())
