"""The flags for steering, with prompts, chats, batch files and a server; and hints for misspelt names."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.cli.chat import TerminalChat
from bridle.cli.steering_options import SteeringOptions
from bridle.config import ModelConfig
from bridle.sampling import SamplingParams
from bridle.serving import load_model
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.http.harness import scripted_model, served

QUICK = ["--no-stats", "--kv-memory", "8MiB", "--max-tokens", "40"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(scripted_model()) as url:
        yield url


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text('{"enum": [10, 20]}', encoding="utf-8")
    (tmp_path / "grammar.lark").write_text('start: "up" | "down"', encoding="utf-8")
    (tmp_path / "grammar.gbnf").write_text('root ::= "left" | "right"', encoding="utf-8")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "asked.jsonl").write_text(
        '{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "Say"}}', encoding="utf-8"
    )
    (tmp_path / "type.json").write_text('{"type": "objct"}', encoding="utf-8")
    (tmp_path / "rule.lark").write_text('start: a\na: "up" | down', encoding="utf-8")
    (tmp_path / "open.lark").write_text('start: "up" (\n', encoding="utf-8")
    (tmp_path / "open.gbnf").write_text('root ::= "left" |\n  "right', encoding="utf-8")
    return tmp_path


FLAGS: list[tuple[list[str], str]] = [
    (["--regex", "[x-z]{3}"], "[x-z]{3}"),
    (["--schema", "schema.json"], "10|20"),
    (["--json-schema", "schema.json"], "10|20"),
    (["--choice", "yes", "--choice", "no"], "yes|no"),
    (["--grammar", "grammar.lark"], "up|down"),
    (["--grammar", "grammar.gbnf"], "left|right"),
]


def placed(flags: list[str], files: Path) -> list[str]:
    return [str(files / word) if (files / word).is_file() else word for word in flags]


@pytest.mark.few(3)
@pytest.mark.parametrize(("flags", "pattern"), FLAGS)
def test_a_prompt_is_held_to_a_constraint(
    folder: str, files: Path, flags: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", folder, "Say", *QUICK, *placed(flags, files)]) == 0
    assert re.fullmatch(pattern, capsys.readouterr().out.strip())


@pytest.mark.parametrize(("flags", "pattern"), FLAGS)
def test_a_server_is_asked_for_a_constraint(server: str, files: Path, flags: list[str], pattern: str) -> None:
    report = files / "report.json"  # standard output has the server's log, too
    assert main(["infer", "Say", "--base-url", server, "--save", str(report), *placed(flags, files)]) == 0
    (text,) = json.loads(report.read_text(encoding="utf-8"))["text"]
    assert re.fullmatch(pattern, text)


def test_a_chat_is_held_to_a_constraint(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(load_model(ModelConfig("demo", num_blocks=256, warm_up=False))) as loaded:
        options = SteeringOptions(choice=("red", "blue"))
        talk = TerminalChat(loaded, SamplingParams(max_tokens=200, seed=1), steering=options, show_stats=False)
        talk.say("Pick one.")
        assert talk.turns[-1]["content"].rpartition("</think>")[2].strip() in ("red", "blue")


def test_lines_of_a_batch_that_say_nothing_are_steered(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    hi = [{"role": "user", "content": "Hi"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "Say"}),
        ("/v1/completions", {"prompt": "Say", "regex": "z"}),
        ("/v1/chat/completions", {"messages": hi}),
        ("/v1/messages", {"messages": hi, "max_tokens": 9}),
        ("/v1/responses", {"input": "Hi"}),
        ("/generate", {"inputs": "Say"}),
        ("/v1/embeddings", {"input": "Say"}),
    ]
    lines = [{"custom_id": str(i), "url": url, "body": body} for i, (url, body) in enumerate(asked)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    words = ["run-batch", str(file), "--model", folder, "--kv-memory", "8MiB", "-o", str(answers), "--choice", "on"]
    assert main(words) == 0
    found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, answers.open(encoding="utf-8"))}
    assert found["0"]["choices"][0]["text"] == "on" and found["1"]["choices"][0]["text"] == "z"
    assert found["2"]["choices"][0]["message"]["content"] == "on"
    assert found["3"]["content"][0]["text"] == "on"
    assert found["4"]["output"][0]["content"][0]["text"] == "on"
    assert found["5"]["generated_text"] == "on" and len(found["6"]["data"]) == 1


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", "Once", "upon", "a", "time"], 'put the prompt in quotes, as in "Once upon a time"'),
        (["generate", "hi", "--temprature", "0"], "Unknown option: --temprature. Did you mean --temperature?"),
        (["generate"], 'generate takes [MODEL] PROMPT, but got 0 words, as in: bridle generate "Once upon a time"'),
        (["infer", "Once", "upon"], 'infer takes one PROMPT, but got 2 words; put it in quotes: "Once upon"'),
        (["chat", "--regx", "a"], "Unknown option: --regx. Did you mean --regex?"),
        (["run-batch", "x", "--chioce", "a"], "Unknown option: --chioce. Did you mean --choice?"),
        (["generate", "hi", "--regex", "a", "--choice", "b"], "regex and choice were given"),
        (["generate", "hi", "--schema", "FILES/bad.json"], "bad.json is not JSON"),
        (["generate", "hi", "--schema", "FILES/none.json"], "none.json: No such file"),
        (["chat", "--schema", "FILES/bytes.json"], "bridle: FILES/bytes.json is not a text file in UTF-8"),
        (["generate", "hi", "--schema", "FILES/type.json"], "FILES/type.json: the schema is not usable: Invalid type"),
        (
            ["infer", "hi", "--grammar", "FILES/rule.lark"],
            "FILES/rule.lark: the grammar is not usable: line 2, column 4",
        ),
        (["chat", "--grammar", "FILES/open.lark"], "FILES/open.lark: the grammar is not usable: line 1, column 14"),
        (
            ["run-batch", "FILES/asked.jsonl", "--grammar", "FILES/open.gbnf"],
            "FILES/open.gbnf: the grammar in GBNF: line 2",
        ),
        (["generate", "hi", "--ctrl", "none", "--ctrl-arg", "x"], "controller_arg is given without a controller"),
    ],
)
def test_what_is_misspelt_gets_its_hint(
    files: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("FILES", str(files)) for word in words]) != 0
    assert told.replace("FILES", str(files)) in " ".join(capsys.readouterr().err.split())
