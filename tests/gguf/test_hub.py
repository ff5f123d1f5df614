"""Tests of GGUF types in hub repositories, downloaded from a fake hub: one file, split files, and progress reports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf.hub import hub
from tests.gguf.kit import pair, split_file

_FETCH = """
import sys
from bridle.errors import BridleError
from bridle.gguf.pointer import weights_of
from bridle.gguf.shards import open_model
from bridle.model.hub_lookup import resolve_model
for name in sys.argv[1:]:
    shares = []
    try:
        file = weights_of(resolve_model(name, progress=shares.append))
    except BridleError as error:
        print("refused:", error)
        continue
    told = (shares == sorted(shares) and shares[-1] == 1, len(shares) > 1) if shares else None
    print(file.name, len(open_model(file).files), told)
"""

_WATCH = """
import logging, sys
from bridle.model.hub_lookup import resolve_model
from bridle.load_progress import shown
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
with shown("Loading it"):
    resolve_model(sys.argv[1])
"""


@pytest.fixture
def address(tmp_path: Path) -> Path:
    """Return the folder of the fake hub's repositories, with files of three types in one repository."""
    repository = tmp_path / "repositories" / "owner" / "tiny"
    repository.mkdir(parents=True)
    shutil.copy(pair("llama")[1], repository / "tiny-F32.gguf")
    shutil.copy(pair("llama", "Q8_0")[1], repository / "tiny-q8_0.gguf")
    split_file(pair("llama")[1], repository / "tiny-BF16")
    (repository / "README.md").write_text("a model")
    return tmp_path / "repositories"


def _run(program: str, names: list[str], url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, because `huggingface_hub` reads the hub's URL when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    child = [sys.executable, "-c", program, *names]
    done = subprocess.run(child, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_types_of_a_repository_are_fetched_once(address: Path, tmp_path: Path) -> None:
    with hub(address) as (url, sent):
        names = ["owner/tiny:Q8_0", "owner/tiny:BF16", "owner/tiny:Q8_0", "owner/tiny:Q4_0", "owner/none:Q8_0"]
        done = _run(_FETCH, names, url, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "tiny-q8_0.gguf 1 (True, False)",
        "tiny-BF16-00001-of-00002.gguf 2 (True, True)",  # the first file is not all, though it is all that has begun
        "tiny-q8_0.gguf 1 None",
    ]
    assert "has no GGUF file of type 'Q4_0'" in lines[3] and lines[4].startswith("refused:")
    assert sorted(sent) == ["tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf", "tiny-q8_0.gguf"]
    assert "Fetching" not in done.stderr  # the client's own bars are off


def test_a_download_is_told_to_those_who_watch(address: Path, tmp_path: Path) -> None:
    with hub(address) as (url, _):
        done = _run(_WATCH, ["owner/tiny:Q8_0"], url, tmp_path)
    told = [line for line in done.stderr.splitlines() if line.startswith("bridle.load_progress")]
    assert told == ["bridle.load_progress Loading it: downloading"]  # it is no terminal
