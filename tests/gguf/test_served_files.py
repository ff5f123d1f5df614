"""Tests of GGUF files as models, on the command line and in requests to a server that loads models on demand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bridle import LLM, SamplingParams
from bridle.cli import main
from bridle.config import ModelConfig
from bridle.http import create_app
from bridle.serving.models.catalog import ModelCatalog
from bridle.serving.models.served_models import EngineLoader, ModelSet, build_registry
from tests.gguf.kit import pair


def test_files_are_found_by_their_path_from_the_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "models", tmp_path / "outside"
    (root / "org" / "deep").mkdir(parents=True)
    outside.mkdir()
    for place in ("a.gguf", "org/b.GGUF", "org/deep/c.gguf", ".hidden.gguf", "org/notes.txt", "text.gguf.part"):
        (root / place).write_bytes(b"x")
    for number in (1, 2):
        (root / f"big-0000{number}-of-00002.gguf").write_bytes(b"x")
    (root / "half-00001-of-00002.gguf").write_bytes(b"x")
    (outside / "d.gguf").write_bytes(b"x")
    (root / "link.gguf").symlink_to(outside / "d.gguf")
    (root / "leaky-00001-of-00002.gguf").write_bytes(b"x")
    (root / "leaky-00002-of-00002.gguf").symlink_to(outside / "d.gguf")
    (root / "folder.gguf").mkdir()
    catalog = ModelCatalog(ModelConfig(backend="llamacpp"), models_dir=root)
    assert catalog.names() == ["a.gguf", "big-00001-of-00002.gguf", "org/b.GGUF"]
    assert catalog.find("a.gguf") == ModelConfig(str(root / "a.gguf"), backend="llamacpp")
    names = ["link.gguf", "leaky-00001-of-00002.gguf", "half-00001-of-00002.gguf", "big-00002-of-00002.gguf", "a"]
    names += ["../outside/d.gguf", "org/../a.gguf", str(root / "a.gguf"), "org/deep/c.gguf", "folder.gguf", ".gguf"]
    assert [name for name in names if catalog.find(name) is not None] == []
    (root / "new.gguf").write_bytes(b"x")
    assert catalog.find("new.gguf") is not None


def test_requests_load_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    names = ["first.gguf", "org/second.gguf"]
    for name, family in zip(names, ("llama", "qwen2"), strict=True):
        shutil.copy(pair(family)[1], tmp_path / name)
    base = ModelConfig(num_blocks=32, num_threads=1)
    registry, fill = build_registry(ModelSet(("auto",), models_dir=tmp_path), base, EngineLoader())
    fill()
    said = {}
    with TestClient(create_app(registry)) as client:
        assert {model["id"] for model in client.get("/v1/models").json()["data"]} >= set(names)
        for name in names:
            body = {"model": name, "prompt": "the one", "max_tokens": 6, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            said[name] = answer.json()["choices"][0]["text"]
        missing = client.post("/v1/completions", json={"model": "third.gguf", "prompt": "the"})
        assert missing.status_code == 404
    registry.close()
    for name in names:
        with LLM(str(tmp_path / name), num_blocks=32, num_threads=1) as llm:
            assert llm.generate("the one", SamplingParams(max_tokens=6, temperature=0.0))[0].text == said[name]


def test_check_takes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(pair("llama", "Q8_0")[1])]) == 0
    assert "llama" in capsys.readouterr().out.lower()
