"""Wrong names and busy ports are refused before torch is imported, with the reason and the name that was meant."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.compat.suggestions import closest
from tests.cli.fake_hub import COMMIT, fake_hub

_RUN = """
import json, sys
from bridle.cli import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    sys.stderr.write("\\0")
    print(json.dumps([code, sorted({"torch", "transformers"} & set(sys.modules))]))
"""
Told = tuple[int, list[str], str]


def run_all(folder: Path, commands: list[list[str]], **environment: str) -> list[Told]:
    """Run commands in one new process. For each command, return its exit code, the slow modules that were imported
    until then, and its error output."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "BRIDLE_"))}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        env=plain | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    *complaints, _ = done.stderr.split("\0")
    assert len(found) == len(complaints) == len(commands), done
    return [(code, slow, told) for (code, slow), told in zip(found, complaints, strict=True)]


def run(folder: Path, *words: str, **environment: str) -> Told:
    return run_all(folder, [list(words)], **environment)[0]


@pytest.fixture(scope="module")
def hub() -> Iterator[dict[str, str]]:
    with fake_hub() as url:
        yield {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


NOWHERE = [
    ["serve", "./nope", "--port", "0"],
    ["serve", "demo", "--draft-model", "./nope", "--port", "0"],
    ["serve-model", "./nope", "--port", "0"],
    ["shard", "./nope"],
    ["generate", "./nope", "Once"],
    ["chat", "./nope"],
    ["check", "./nope"],
    ["doctor", "./nope"],
    ["quantize", "./nope", "out.gguf"],
    ["run-batch", "none.jsonl", "--model", "./nope"],
    ["test", "--model", "./nope"],
    ["lmtp", "any", "--tokenizer", "./nope"],
    ["pull", "./nope"],
]


def test_a_path_that_leads_nowhere_is_refused_without_torch(tmp_path: Path) -> None:
    for words, (code, slow, told) in zip(NOWHERE, run_all(tmp_path, NOWHERE), strict=True):
        assert (code, slow) == (2, []), words
        assert told.startswith("bridle: './nope' is neither") and told.count("\n") == 1, words


def test_replay_refuses_a_model_without_torch(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("{}\n")
    code, slow, told = run(tmp_path, "replay", str(tmp_path / "some.jsonl"), "./nope")
    assert (code, slow) == (2, []) and "'./nope' is neither" in told


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["serve", "serve-model"])
def test_a_busy_port_is_refused_without_torch(command: str, tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        code, slow, told = run(tmp_path, command, "demo", "--host", "127.0.0.1", "--port", str(port))
    assert (code, slow) == (2, [])
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another port" in told


REASONS = [
    ("Qwen/Qwen3-0.6", "was not found: there is no such folder, and http://127.0.0.1:", "Qwen/Qwen3-0.6B"),
    ("nobody/zzzzzzzzzzzz", "has no such model (a private one needs HF_TOKEN)", None),
    ("demo-see", "was not found", "demo-sees"),
    ("org/gated", "is gated: accept its terms at http://127.0.0.1:", None),
    ("org/broken", "answered with status 503", None),
]


def test_the_hub_gives_its_reason(tmp_path: Path, hub: dict[str, str]) -> None:
    answers = run_all(tmp_path, [["generate", name, "Once"] for name, _, _ in REASONS], **hub)
    for (name, reason, meant), (code, slow, told) in zip(REASONS, answers, strict=True):
        assert (code, slow) == (2, [])
        assert f"model '{name}'" in told and reason in told
        assert ("Did you mean" in told) == (meant is not None)
        assert meant is None or told.rstrip().endswith(f"Did you mean {meant}?")


def test_no_network_and_offline_mode_are_told_apart(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens there
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code, slow, told = run(tmp_path, "chat", "org/name", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert (code, slow) == (2, [])
    assert f"is not in the local hub cache, and {endpoint} cannot be reached" in told
    code, slow, told = run(tmp_path, "chat", "org/name")
    assert (code, slow) == (2, []) and "offline mode is on: unset HF_HUB_OFFLINE" in told


def test_a_model_is_pulled_then_listed_and_suggested(tmp_path: Path, hub: dict[str, str]) -> None:
    code, slow, told = run(tmp_path, "pull", "org/small-model", **hub)
    assert (code, slow) == (0, []), told
    folder = tmp_path / "hf" / "hub" / "models--org--small-model" / "snapshots" / COMMIT
    assert (folder / "config.json").is_file()
    code, slow, told = run(tmp_path, "generate", "org/smal-model", "Once")
    assert code == 2 and told.rstrip().endswith("Did you mean org/small-model?")
    code, slow, _ = run(tmp_path, "list")
    assert (code, slow) == (0, [])


def test_a_neighbour_of_a_wrong_path_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    names = [str(tmp_path / "my-modl"), str(tmp_path / "no" / "my-model")]
    (_, _, near), (_, _, far) = run_all(tmp_path, [["check", name] for name in names])
    assert near.rstrip().endswith(f"Did you mean '{tmp_path / 'my-model'}'?")
    assert f"there is no folder '{tmp_path / 'no'}' either" in far


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("qwen3-0.6b", ("Qwen/Qwen3-0.6B", "demo"), "Qwen/Qwen3-0.6B"),
        ("demoo", ("demo", "demo-sees"), "demo"),
        ("--modle", ("--model", "--models-dir"), "--model"),
        ("--prot", ("--mirostat", "--host"), None),
        ("xyz", ("demo",), None),
    ],
)
def test_a_slip_finds_the_closest_name(name: str, known: tuple[str, ...], meant: str | None) -> None:
    assert closest(name, known) == meant


# -- list, ps, version ---------------------------------------------------------------------------------------------


def test_list_has_the_packaged_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    packaged = {row["name"]: row for row in rows if row["kind"] == "packaged"}
    assert set(packaged) == {"demo", "demo-sees"} and packaged["demo"]["num_bytes"] > 1e6
    assert main(["list"]) == 0
    titles, *lines = capsys.readouterr().out.splitlines()
    assert titles.split() == ["NAME", "KIND", "SIZE", "MODIFIED"] and lines[0].split()[:2] == ["demo", "packaged"]


def test_there_is_nothing_to_pull_for_what_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "demo"]) == 2
    assert "'demo', which comes with bridle: there is nothing to download" in capsys.readouterr().err
    assert main(["pull", str(tmp_path)]) == 2
    assert "is on this machine already" in capsys.readouterr().err


def test_version_imports_no_backend(tmp_path: Path) -> None:
    code, slow, _ = run(tmp_path, "version")
    assert (code, slow) == (0, [])


def test_version_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    import bridle

    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bridle"] == bridle.__version__ and found["torch"] == version("torch")
    assert set(found) == {"bridle", "python", "torch", "transformers", "llama.cpp"}
