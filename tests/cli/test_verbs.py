"""Commands that load a model, on a tiny checkpoint: what goes to standard output, and what to standard error."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridle.cli import main
from bridle.cli.chat import TerminalChat
from bridle.cli.output import TerminalTextStream
from bridle.outputs import FinishReason
from tests.fakes.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


GREEDY = ["--temperature", "0", "--max-tokens", "6"]


def test_generate_streams_text(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "hello there", *GREEDY]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert captured.out.strip()
    assert "6 out" in captured.err
    assert main(["generate", folder, "hello there", *GREEDY, "--no-stats"]) == 0
    again = capsys.readouterr()
    assert again.out == captured.out
    assert "out" not in again.err


def test_json_says_the_same(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "hello there", *GREEDY, "--no-stats"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", folder, "hello there", *GREEDY, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] + "\n" == text
    assert len(report["token_ids"]) == report["usage"]["completion_tokens"] == 6
    assert report["finish_reason"] == "length"


def test_drafts_change_no_text_and_are_counted(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", folder, "hello there", "--temperature", "0", "--max-tokens", "12"]
    assert main([*words, "--speculate", "off"]) == 0
    plain = capsys.readouterr()
    assert "drafted" not in plain.err
    assert main([*words, "--speculate", "4", "--prediction", plain.out.removesuffix("\n")]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    right, made = re.search(r"(\d+) of (\d+) drafted right", drafted.err).groups()  # type: ignore[union-attr]
    assert 0 < int(right) <= int(made)


def test_prompt_from_standard_input(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", folder, "hello there", *GREEDY, "--json"]) == 0
    direct = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello there"))
    assert main(["generate", folder, "-", *GREEDY, "--json"]) == 0
    assert capsys.readouterr().out == direct


def test_seed_makes_it_repeatable(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", folder, "hello", "--temperature", "2", "--max-tokens", "12", "--json", "--seed"]
    outputs = []
    for seed in ("7", "7", "8"):
        assert main([*words, seed]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1] != outputs[2]


def test_prompt_that_does_not_fit_is_a_mistake(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "hello there " * 50, "--max-model-len", "16"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "16" in captured.err


@pytest.mark.parametrize("name", ["no/such-model", "./no-such-folder"])
def test_unknown_model_is_a_mistake(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", name, "hello"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("bridle: ")
    assert name.removeprefix("./") in message


def test_check_reports_equality(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", folder]) == 0
    assert "equal" in capsys.readouterr().out


def test_chat_needs_a_template(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert main(["chat", str(tmp_path)]) == 2
    assert "has no chat template; use `bridle generate`" in capsys.readouterr().err


def test_conversation_remembers_and_forgets(lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines += ["What is the capital of France?", "/undo", "/system Be kind.", "Hello!", "/reset", "/what", "/quit"]
    assert main(["chat", "--temperature", "0", "--max-tokens", "20"]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert "0 turns, system prompt: none" in shown
    assert "0 turns, system prompt: Be kind." in shown
    assert shown.count("/reset forgets the conversation") == 2  # at the start, and for a command it does not know


def test_a_stopped_reply_counts_what_was_made(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    show = Console.print

    def print_until_stopped(console: Console, *objects: Any, **how: Any) -> None:
        show(console, *objects, **how)
        if how.get("end") == "" and objects:
            shown.append(str(objects[0]))
            if len(shown) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(Console, "print", print_until_stopped)
    kept: list[TerminalChat] = []
    say = TerminalChat.say
    monkeypatch.setattr(TerminalChat, "say", lambda self, text: (kept.append(self), say(self, text))[1])
    streams: list[TerminalTextStream] = []
    keep = TerminalChat.keep_stream
    monkeypatch.setattr(
        TerminalChat, "keep_stream", lambda self, stream: (streams.append(stream), keep(self, stream))[1]
    )
    lines += ["Tell me a long story.", "/quit"]
    assert main(["chat", "--temperature", "0", "--max-tokens", "200"]) == 0
    *pieces, end = shown
    assert end == "[dim] (stopped)[/dim]"
    assert [turn["content"] for turn in kept[0].turns] == ["Tell me a long story.", "".join(pieces)]
    (output,) = streams[0].output.outputs
    assert output.finish_reason is FinishReason.CANCELLED and 2 < len(output.token_ids) < 200
    assert f"{len(output.token_ids)} out" in capsys.readouterr().out


def test_conversation_survives_a_full_context(lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines += ["word " * 200, "Hello!"]
    assert main(["chat", "--max-model-len", "128", "--max-tokens", "8", "--temperature", "0"]) == 0
    shown = capsys.readouterr().out
    assert "/reset or /undo makes room" in shown
    assert "8 out" in shown or "out, first after" in shown
