"""Tests of traces of a real Wasm controller: they are saved, replayed, and tested with and without the model."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from bridle.aici.protocol import Auth
from bridle.aici.runtime.modules import ModuleStore
from bridle.cli import main
from bridle.traces import read
from bridle.traces.replay_text import rebuild
from tests.aici.guests import END, force, guest2, say

pytestmark = pytest.mark.slow  # a control runtime starts for each command


def test_a_module_is_replayed_and_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "traces"
    folder.mkdir()
    trace, module = folder / "answer.jsonl", tmp_path / "other.wasm"
    words = ["generate", "Is the sky blue?", "--ctrl", "yesno", "--ctrl-arg", "Is it?", "--seed", "7", "--no-stats"]
    assert main([*words, "--trace", str(trace)]) == 0
    (old,) = read(trace)
    (output,) = rebuild(old)
    assert output.text.strip() in ("Yes", "No"), output.text
    capsys.readouterr()

    assert main(["replay", str(trace)]) == 0
    assert "All is the same, to the last bit" in capsys.readouterr().out
    assert main(["test", str(folder), "--model", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] == 1
    assert main(["test", str(folder)]) == 0
    capsys.readouterr()

    module.write_bytes(guest2([[say("other\n"), *force([100, 101])], END]))
    move_name("yesno", module, tmp_path / "data" / "bridle" / "controllers")
    assert main(["replay", str(trace)]) == 0
    told = capsys.readouterr().out
    assert "All is the same, to the last bit" in told
    assert f"The name 'yesno' means module {sha256(module.read_bytes()).hexdigest()} now" in told

    other = tmp_path / "other.jsonl"
    assert main(["replay", str(trace), "--controller", str(module), "--save", str(other)]) == 1
    told = capsys.readouterr().out
    assert "recorded" in told and "Other logs: outputs 0." in told and "other" in told
    (saved,) = read(other)
    form = saved.header.controller
    assert form is not None
    assert form["wasm"]["module"] == sha256(module.read_bytes()).hexdigest()
    assert main(["replay", str(other)]) == 0  # by its hash
    capsys.readouterr()
    assert main(["test", str(folder), "--model", "demo", "--controller", str(module), "--json"]) == 1
    (tested,) = json.loads(capsys.readouterr().out)["traces"]
    assert tested["outcome"] == "different"
    assert "forced by" in " ".join(tested["sentences"])

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "elsewhere"))
    assert main(["replay", str(other)]) == 2
    assert "which is not stored on this machine any more" in capsys.readouterr().err


def move_name(name: str, module: Path, folder: Path) -> None:
    """Give the name to the module of this file, in a runtime's store."""
    admin = Auth("localhost", True)
    store = ModuleStore(folder)
    try:
        store.set_tags(store.add(module.read_bytes(), admin), [name], admin)
    finally:
        store.close()
