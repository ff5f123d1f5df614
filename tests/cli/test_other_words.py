"""Flags of other servers lead to flags that are here, and the page about them says the same."""

from __future__ import annotations

import re

import pytest

from bridle.cli.app import app
from bridle.cli.other_words import OTHER_WORDS, advice
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
OURS = {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}


@pytest.mark.parametrize(("flag", "here"), OTHER_WORDS.items())
def test_what_is_named_is_here(flag: str, here: str) -> None:
    named = re.findall(r"--[a-z][a-z-]+", here)
    assert set(named) <= OURS
    assert named or not here.startswith("--")
    assert flag not in OURS  # or nobody would be told


@pytest.mark.parametrize("flag", OTHER_WORDS)
def test_the_page_has_it(flag: str) -> None:
    assert f"`{flag}`" in PAGE


def test_flags_are_known_however_they_are_written() -> None:
    assert advice("--tensor_parallel_size=2") == advice("--tensor-parallel-size") == "here it is --shards"
    assert advice("--cont-batching") == "needs no flag: it is always on"
    assert advice("--frobnicate") is None


def test_help_knows_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    from bridle.cli import main

    assert main(["help", "gpu-memory-utilization"]) == 1
    assert "here it is --kv-memory" in " ".join(capsys.readouterr().out.split())
