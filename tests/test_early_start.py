"""Tests of work that `serve` begins early: it is done when it is needed, and errors appear where the file is loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle import early_start
from bridle.cli import main
from bridle.config import ModelConfig
from bridle.early_start import await_unpacking, begin_unpacking
from bridle.errors import UnsupportedModel
from bridle.file_cache import entries
from bridle.gguf.folder import is_unpacked, unpack
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.models.early_parts import begin_parts
from tests.gguf.kit import pair


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(early_start, "num_cores", lambda: 2)
    yield
    await_unpacking()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(pair("llama", "Q8_0")[1], tmp_path / "small.gguf"))


def test_another_process_unpacks_a_file(file: Path) -> None:
    assert begin_unpacking(file)
    await_unpacking()
    assert is_unpacked(file)
    assert not begin_unpacking(file), "there is nothing left to do"


def test_it_keeps_the_vocabulary_of_a_large_tokenizer(file: Path) -> None:
    command = [sys.executable, "-c", _UNPACKS, str(file)]
    subprocess.run(command, check=True)
    assert "vocabularies" in {entry.path.parent.name for entry in entries()}


_UNPACKS = """
import runpy, sys
from bridle.tokenizer import vocabulary_cache
vocabulary_cache.LEAST_BYTES = 0
runpy.run_module("bridle.tokenizer.unpacking", run_name="__main__")
"""


def test_parts_wait_for_it(file: Path) -> None:
    assert begin_unpacking(file)
    begin_parts(ModelConfig(model=str(file)), ControlSettings("off"))
    assert not early_start.UNPACKING and is_unpacked(file)


def test_one_core_has_nothing_to_spare(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "num_cores", lambda: 1)
    assert not begin_unpacking(file) and not is_unpacked(file)


def test_loading_a_damaged_file_reports_the_error(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    assert begin_unpacking(path)
    await_unpacking()
    with pytest.raises(UnsupportedModel):
        unpack(path)


def test_the_server_begins_before_its_libraries_are_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bridle.cli.serve.ServerOptions.to_settings", end)
    main(["serve", str(file)])
    assert early_start.UNPACKING
    await_unpacking()
    assert is_unpacked(file)


_PRELOADS = """
import sys
from bridle.early_start import preload_torch
preload_torch().result()
mapped = "libtorch_cpu" in open("/proc/self/maps").read()
before = "torch" in sys.modules
import torch
print(mapped, before, torch.ones(2).sum().item())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no list of libraries")
def test_the_library_of_torch_is_read_without_torch() -> None:
    told = subprocess.run([sys.executable, "-c", _PRELOADS], capture_output=True, text=True, check=True).stdout
    assert told == "True False 2.0\n"
