"""Tests that the description of a GGUF file equals the description of the checkpoint that it was made from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridle.demo import demo_model_path
from bridle.errors import UnsupportedModel
from bridle.model.description import describe
from tests.gguf.kit import pair


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_and_its_checkpoint_agree(family: str) -> None:
    original, file = map(describe, pair(family))
    assert (original.format, file.format) == ("safetensors", "gguf")
    for name in ("num_parameters", "context", "embedding_length", "kv_values", "quantization", "num_bytes"):
        assert getattr(original, name) == getattr(file, name) != 0, name
    assert file.kv_bytes(10) == 40 * file.kv_values and file.kv_bytes(10, 2) == 20 * file.kv_values


def test_layers_without_attention_have_no_keys() -> None:
    """Only one of LFM2's three layers has keys and values, with two heads of width 8; Mamba 2 has none."""
    assert describe(pair("lfm2")[1]).kv_values == 2 * 2 * 8
    assert describe(pair("mamba2")[1]).kv_values == 0


def test_the_type_of_a_file_is_named() -> None:
    assert describe(pair("llama", "Q8_0", hidden_size=64, intermediate_size=64, head_dim=32)[1]).quantization == "Q8_0"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    _, file = pair("llama")
    (tmp_path / "one.gguf").write_bytes(file.read_bytes())
    assert describe(tmp_path) == describe(tmp_path / "one.gguf")
    (tmp_path / "two.gguf").write_bytes(file.read_bytes())
    with pytest.raises(UnsupportedModel, match="1 GGUF model; it has 2"):
        describe(tmp_path)


def test_what_a_model_can_do() -> None:
    demo, seeing = describe(demo_model_path()), describe(demo_model_path("demo-sees"))
    assert demo.capabilities[:2] == ["completion", "tools"] and "vision" not in demo.capabilities
    assert "vision" in seeing.capabilities and demo.parameter_size == "4.92M"


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x0a\0\0\0\0\0\0\0" + b'{"a":{}}  '])
def test_damaged_weights_are_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(UnsupportedModel, match=r"not a safetensors file|is damaged"):
        describe(tmp_path)


def test_torch_is_not_needed() -> None:
    program = (
        "import sys; from pathlib import Path; from bridle.model.description import describe; "
        f"describe(Path({str(pair('llama')[1])!r})); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
