"""Tests the README's first answer with the model that it names, SmolLM2-135M-Instruct. `BRIDLE_SMOLLM2` names the
model's GGUF file, because it has to be downloaded; `bridle pull smollm2` prints its path. `test_pages.py` runs the same
program with the demo model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bridle import LLM, WasmController
from bridle.serving import ControlSettings
from tests.http.controlled import lent
from tests.http.harness import served
from tests.pages import Block, blocks_of, log_elsewhere, run_programs
from tests.sources import DEFAULT_MODEL, ROOT, SERVED_AT

MODEL = Path(os.environ.get("BRIDLE_SMOLLM2") or os.devnull)
README = (ROOT / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason="BRIDLE_SMOLLM2 names no file")


def shown(language: str) -> Block:
    """Return the README's only block in the given language."""
    (found,) = [block for block in blocks_of(README) if block.language == language]
    return found


def test_the_first_answer_is_the_one_that_is_shown() -> None:
    log_elsewhere()
    with LLM(str(MODEL)) as llm, served(replace(lent(llm.model), name=DEFAULT_MODEL)) as url:
        printed = run_programs(blocks_of(README.replace(SERVED_AT, url)), "README.md", {})
    assert "Paris" in printed


def test_the_script_writes_what_is_shown() -> None:
    (run,) = [block for block in blocks_of(README) if block.text.startswith("bridle run")]
    with LLM(str(MODEL), control=ControlSettings("on", args=("--limit", "max_prepare_wait=600000"))) as llm:
        script = WasmController("jsctrl", shown("js").text)
        (output,) = llm.generate("\n", controller=script, temperature=0)
    run.check(output.text)
