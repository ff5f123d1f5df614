"""Tests of names of GGUF models on the command line and elsewhere: a file, a folder, or a type in a hub repository."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.gguf.pointer import POINTER, cache_folder, weights_of
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.hub_lookup import resolve_model
from bridle.model.memory_estimate import weights_of as memory_of
from bridle.serving.models.loading import model_name
from tests.gguf.kit import folder, pair


def test_a_file_is_unpacked_once(tmp_path: Path) -> None:
    _, file = pair("llama")
    made = resolve_model(str(file))
    before = (made / "tokenizer.json").stat().st_mtime_ns
    assert made.parent == cache_folder() and weights_of(made) == file
    assert {path.name for path in made.iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", POINTER)
    }
    assert resolve_model(str(file)) == made and (made / "tokenizer.json").stat().st_mtime_ns == before
    copy = shutil.copy(file, tmp_path / "other.gguf")
    assert resolve_model(str(copy)) != made
    assert model_name(str(file)) == file.stem


def test_a_folder_with_one_file_stands_for_it(tmp_path: Path) -> None:
    _, file = pair("llama")
    shutil.copy(file, tmp_path / "a-F32.gguf")
    assert weights_of(resolve_model(str(tmp_path))) == tmp_path / "a-F32.gguf"
    shutil.copy(file, tmp_path / "a-Q8_0.gguf")
    with pytest.raises(UnsupportedModel, match=r"2 GGUF files that are meant.*a-F32\.gguf, a-Q8_0\.gguf"):
        resolve_model(str(tmp_path))


def test_a_type_in_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = pair("llama")
    shutil.copy(file, tmp_path / "Tiny-Q8_0.gguf")
    shutil.copy(file, tmp_path / "tiny-q4_k_m.gguf")
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert weights_of(resolve_model("owner/tiny:Q8_0")) == tmp_path / "Tiny-Q8_0.gguf"
    assert weights_of(resolve_model("owner/tiny:Q4_K_M", "main")) == tmp_path / "tiny-q4_k_m.gguf"
    assert asked == [
        ("owner/tiny", None, ["*Q8_0*.gguf", "*q8_0*.gguf"]),
        ("owner/tiny", "main", ["*Q4_K_M*.gguf", "*q4_k_m*.gguf"]),
    ]
    with pytest.raises(UnsupportedModel, match=r"no GGUF file of type 'Q6_K' .Tiny-Q8_0\.gguf"):
        resolve_model("owner/tiny:Q6_K")
    with pytest.raises(InvalidRequest, match="neither 'demo', 'demo-sees', an existing"):
        resolve_model("owner/tiny:../../x")


def test_a_damaged_pointer_is_refused(tmp_path: Path) -> None:
    _, file = pair("llama")
    made = shutil.copytree(resolve_model(str(file)), cache_folder() / tmp_path.name)
    (made / POINTER).write_text("[1]")
    with pytest.raises(UnsupportedModel, match=r"gguf\.json is damaged"):
        inspect_checkpoint(made)


def test_a_pointer_in_somebody_elses_folder_means_nothing(tmp_path: Path) -> None:
    """A pointer file is followed only in bridle's own cache: a checkpoint from the hub cannot name other files as its
    weights."""
    _, file = pair("llama")
    folder_of_others = shutil.copytree(resolve_model(str(file)), tmp_path / "made")
    assert weights_of(folder_of_others) is None
    with pytest.raises(UnsupportedModel, match="has no weights"):
        inspect_checkpoint(folder_of_others)


def test_memory_is_that_of_packed_weights() -> None:
    from bridle.config import ModelConfig

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    _, packed = pair("llama", "Q8_0", **sizes)
    _, whole = pair("llama", "F32", **sizes)
    ratio = memory_of(ModelConfig(str(packed))) / memory_of(ModelConfig(str(whole)))
    assert 8.5 / 32 <= ratio < 0.28


def test_quantize_writes_what_serve_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo.gguf"
    assert main(["quantize", "demo", str(out), "--type", "F32"]) == 0
    assert capsys.readouterr().out.strip() == str(out) and not list(tmp_path.glob(".*"))
    assert main(["generate", str(out), "Once upon a time", "--temperature", "0", "--max-tokens", "8"]) == 0
    said = capsys.readouterr().out
    assert main(["generate", "demo", "Once upon a time", "--temperature", "0", "--max-tokens", "8"]) == 0
    assert said.strip() == capsys.readouterr().out.strip() != ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["demo", "x.gguf", "--type", "Q9"], "type is 'Q9'; must be one of F32"),
        (["demo", "x.safetensors"], "the name of a GGUF file must end in .gguf"),
        (["demo", "."], ". exists already"),
    ],
)
def test_mistakes_of_quantize_are_one_line(
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_gguf_file_is_not_quantized_again() -> None:
    from bridle.serving.models.export import quantize_model

    with pytest.raises(UnsupportedModel, match="is a GGUF file already"):
        quantize_model(str(pair("llama")[1]), folder() / "again.gguf", "Q8_0")


def test_the_variable_of_the_cache_is_known() -> None:
    from bridle.cli.setup_probes import variables

    assert not list(variables({"BRIDLE_CACHE": "somewhere"}))
