"""Tests of docs/lora.md: its code runs, and its flags, routes and fields exist."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from bridle.cli import main
from bridle.http import create_app
from bridle.http.metrics.metrics import MAX_ADAPTER_LABELS
from bridle.lora.peft_config import MAX_RANK
from bridle.serving import ModelRegistry
from tests.serving.fakes import fake_model
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "lora.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "lora.md", "exec", dont_inherit=True), {})
    base, _, pirate = capsys.readouterr().out.partition("|")
    assert base.strip() == "Paris." and pirate.strip() != "Paris."


@pytest.mark.parametrize("command", ["serve", "serve-model", "run-batch"])
def test_the_flags_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help-all"])
    shown = capsys.readouterr().out
    flags = set(re.findall(r"`(--(?:adapter|allow-adapter|max-step)[a-z-]*)", PAGE))
    missing = flags - set(re.findall(r"--[a-z-]+", shown))
    assert len(flags) == 7 and missing == ({"--adapter-kernel"} if command == "serve-model" else set())


def test_the_routes_are_there() -> None:
    paths = create_app(ModelRegistry([fake_model()])).openapi()["paths"]
    for verb, path in re.findall(r"`(GET|POST|DELETE) (/v1/[a-z_/{}]+)`", PAGE):
        assert verb.lower() in paths[path.replace("{name}", "{name}")], path


def test_the_page_has_the_limits_of_the_code() -> None:
    page = " ".join(PAGE.split())
    assert f"ranks up to {MAX_RANK}" in page and f"the first {MAX_ADAPTER_LABELS} adapters" in page
