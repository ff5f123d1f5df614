"""Tests of work that begins before libraries are imported. The result is used only for its model, and is closed if it
is not used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridle.config import ModelConfig
from bridle.errors import UnsupportedModel
from bridle.serving.controller_runtime import ControlStart
from bridle.serving.models import early_parts, served_models
from bridle.serving.models.early_parts import EarlyParts
from bridle.serving.models.served_models import EngineLoader
from tests.fakes import tiny_checkpoints
from tests.gguf.kit import pair
from tests.sources import ROOT


class Started(ControlStart):
    """A runtime that is never started, and records when it is ended."""

    def __init__(self) -> None:
        self.has_ended = False

    def abandon(self) -> None:
        self.has_ended = True


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    made: list[Started] = []

    def begin(*arguments: object) -> Started:
        made.append(Started())
        return made[-1]

    monkeypatch.setattr(early_parts, "begin_control_of", begin)
    return made


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[EarlyParts | None]:
    """Return the list of early results that loads get."""
    found: list[EarlyParts | None] = []
    monkeypatch.setattr(served_models, "load_model", lambda *_, early, **__: found.append(early))
    return found


def folder_of(tmp_path: Path) -> ModelConfig:
    return ModelConfig(str(shutil.copytree(tiny_checkpoints.cached_checkpoint("llama"), tmp_path / "model")))


def silent(stage: str, share: float) -> None:
    pass


def test_the_first_model_is_begun_once_and_gets_its_parts(
    tmp_path: Path, runtimes: list[Started], given: list[Any]
) -> None:
    config, loader = folder_of(tmp_path), EngineLoader()
    roomy = loader.make_room(config)
    loader.measure(roomy, "model")
    for _ in range(2):
        loader.load(replace(roomy, max_kv_memory=1 << 20), "model", silent)
    assert len(runtimes) == 1 and not runtimes[0].has_ended
    assert given[0].control is runtimes[0] and given[1] is None
    assert given[0].get_tokenizer().encode("a") == given[0].get_tokenizer().encode("a") != []


@pytest.mark.parametrize("change", ["file", "model", "settings"])
def test_parts_of_something_else_are_ended(
    tmp_path: Path, runtimes: list[Started], given: list[Any], change: str
) -> None:
    config, loader = folder_of(tmp_path), EngineLoader()
    loader.measure(config, "model")
    if change == "file":
        (Path(config.model) / "tokenizer_config.json").write_text("{}")
    elif change == "model":
        config = replace(config, model=str(tiny_checkpoints.cached_checkpoint("qwen2")))
    else:
        config = replace(config, tool_format="hermes")
    loader.load(config, "model", silent)
    assert given == [None] and runtimes[0].has_ended


def test_parts_of_a_model_that_cannot_be_measured_are_ended(tmp_path: Path, runtimes: list[Started]) -> None:
    config = folder_of(tmp_path)
    (Path(config.model) / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UnsupportedModel):
        EngineLoader().measure(config, "model")
    assert [runtime.has_ended for runtime in runtimes] == [True]


_NEEDS_NONE = """
import sys
from bridle.config import ModelConfig
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.models.early_parts import begin_parts
print(len(begin_parts(ModelConfig(sys.argv[1]), ControlSettings("off")).get_tokenizer().encode("one")) > 0)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_parts_of_a_file_need_no_library_that_computes() -> None:
    command, environment = (
        [sys.executable, "-c", _NEEDS_NONE, str(pair("qwen2")[1])],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert told == "True\n[]\n"
