"""Tests that the flags in the tables of the migration pages exist, both the other server's and bridle's."""

from __future__ import annotations

import re

import pytest

from bridle.cli.app import app
from bridle.compat.cli_flags import row_of
from bridle.compat.schema import System
from tests.sources import ROOT

PAGES: dict[str, System | None] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama-cpp": "llama.cpp",
    "tgi": "TGI",
    "ollama": None,  # its settings are variables
}
KNOWN = set().union(
    *(argument.names for verb in (app["serve"], app["keys"]["add"]) for argument in verb.assemble_argument_collection())
)
_FLAG = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")


def cells(name: str) -> list[tuple[list[str], list[str]]]:
    """Return the flags of each table row: those of the other server, and those of bridle."""
    page = (ROOT / "docs" / f"from-{name}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \|$", page, re.MULTILINE)
    code = [[" ".join(re.findall(r"`([^`]+)`", cell)) for cell in row] for row in rows]
    return [(_FLAG.findall(there), _FLAG.findall(here)) for there, here in code]


@pytest.mark.parametrize(("name", "system"), PAGES.items())
def test_flags_exist(name: str, system: System | None) -> None:
    rows = cells(name)
    assert len(rows) > 10
    assert not [flag for _, here in rows for flag in here if flag not in KNOWN]
    if system is not None:
        assert not [flag for there, _ in rows for flag in there if row_of(system, flag) is None]
