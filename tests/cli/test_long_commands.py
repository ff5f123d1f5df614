"""Long commands report their progress on standard error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridle.cli import main
from bridle.load_progress import Report
from tests.fakes.tiny_checkpoints import make_checkpoint

Told = list[tuple[str, str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Reported titles, stages and shares."""
    found: Told = []

    @contextmanager
    def shown(title: str, *, prints: bool = False) -> Iterator[Report]:
        assert prints  # where there is no terminal, too
        found.append((title, "", 0.0))
        yield lambda stage, share: found.append((title, stage, share))

    monkeypatch.setattr("bridle.load_progress.shown", shown)
    monkeypatch.setattr("bridle.cli.loading.shown", shown)
    return found


def of(told: Told, beginning: str) -> list[tuple[str, float]]:
    return [(stage, share) for title, stage, share in told if title.startswith(beginning)]


def test_replay_tells_loading_and_then_tokens(folder: str, tmp_path: Path, told: Told) -> None:
    path = str(tmp_path / "one.jsonl")
    words = ["--max-tokens", "4", "--seed", "1", "--no-stats", "--kv-memory", "8MiB"]
    assert main(["generate", folder, "hello", *words, "--sampling", "ignore_eos=true", "--trace", path]) == 0
    told.clear()
    assert main(["replay", path, folder, "--kv-memory", "8MiB"]) == 0
    assert told[0][0].startswith("Loading ") and len(of(told, "Loading ")) > 1
    steps = of(told, "Replaying request 1 of 1")
    assert steps == [("", 0.0), *((f"{count} of 4 tokens", count / 4) for count in range(5))]


def test_explain_tells_that_it_reads(folder: str, tmp_path: Path, told: Told) -> None:
    path = str(tmp_path / "one.jsonl")
    assert main(["generate", folder, "hello", "--max-tokens", "2", "--kv-memory", "8MiB", "--trace", path]) == 0
    assert main(["explain", path]) == 0
    assert of(told, f"Reading {path}")


def test_a_batch_tells_how_many_are_answered(folder: str, tmp_path: Path, told: Told) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "hello", "max_tokens": 2}
    lines = [{"custom_id": str(number), "url": "/v1/completions", "body": body} for number in range(2)]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert main(["run-batch", str(source), "--model", folder, "--kv-memory", "8MiB", "-o", str(target)]) == 0
    assert of(told, "Answering requests")[1:] == [("0 of 2", 0.0), ("1 of 2", 0.5), ("2 of 2", 1.0)]


def test_check_and_quantize_tell_their_stages(folder: str, tmp_path: Path, told: Told) -> None:
    assert main(["check", folder]) == 0
    assert ("comparing with transformers", 0.3) in of(told, "Checking ")
    assert main(["quantize", folder, str(tmp_path / "int8"), "--type", "int8"]) == 0
    assert ("reading weights", 0.0) in of(told, "Quantizing ")
