"""`--trace` and `--show tokens` of the commands that generate here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.cli import main
from bridle.traces import read
from bridle.traces.replay_text import rebuild
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.http.harness import saying, scripted_model, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


WORDS = [
    "--temperature",
    "1",
    "--seed",
    "4",
    "--max-tokens",
    "6",
    "--no-stats",
    "--kv-memory",
    "8MiB",
    "--regex",
    "[a-z]{3,}",
]


def test_generate_keeps_a_trace(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jsonl"
    assert main(["generate", folder, "hello", *WORDS, "--trace", str(path)]) == 0
    text = capsys.readouterr().out
    (trace,) = read(path)
    assert rebuild(trace)[0].text + "\n" == text
    assert trace.header.controller == {"name": "regex", "constraint": {"regex": "[a-z]{3,}"}}
    assert main(["generate", folder, "hello", *WORDS, "--show", "tokens"]) == 0
    assert capsys.readouterr().out == text  # no terminal, no colours
    assert main(["generate", folder, "hello", *WORDS, "--json", "--trace", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == rebuild(next(read(path)))[0].token_ids
    assert main(["explain", str(path)]) == 0
    assert "by regex" in capsys.readouterr().out


def test_a_file_that_cannot_be_is_a_mistake(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "hello", "--trace", "no-such-folder/a.jsonl"]) == 2
    assert "there is no folder no-such-folder" in capsys.readouterr().err


def test_a_conversation_keeps_its_traces(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["hello", "again", "/quit"]
    monkeypatch.setattr("rich.console.Console.input", lambda *_: typed.pop(0))
    path = tmp_path / "chat.jsonl"
    assert main(["chat", folder, *WORDS, "--trace", str(path), "--show", "tokens"]) == 0
    out = capsys.readouterr().out
    first, second = [rebuild(trace)[0].text for trace in read(path)]
    assert f"{first}\n" in out
    assert f"{second}\n" in out


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(scripted_model(next_token=saying("good day"))) as url:
        yield url


def test_a_run_on_a_server_keeps_its_trace(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    words = ["infer", "Say", "--base-url", server, "--trace", str(path), "--show", "tokens"]
    assert main(words) == 0
    assert "good day" in capsys.readouterr().out
    (trace,) = read(path)
    assert rebuild(trace)[0].text == "good day"
    assert main(["run", "-c", "none", "--base-url", server, "-p", "Say", "--trace", str(path)]) == 0
    assert rebuild(next(read(path)))[0].text == "good day"
