"""The benchmark of pictures: its peers say the same, and a chat's picture is encoded once. Times are never asserted."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bridle.bench import BenchSettings
from bridle.bench.run import measured
from bridle.errors import InternalError
from dev.bench import images


def test_peers_say_the_same_and_a_picture_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHAPES", {"quick": (2, 32, 2, 32, 28)})
    monkeypatch.setattr(images, "_COUNTS", (0, 2))
    console = Console(file=io.StringIO(), width=120)
    report, _ = measured(images, BenchSettings(quick=True), console)
    assert [(each["pictures"], each["peer"]) for each in report["prompts"]] == [
        (0, "bridle"),
        (0, "transformers"),
        (2, "bridle"),
        (2, "transformers"),
    ]
    assert {each["prompt_tokens"] for each in report["prompts"]} == {25, 25 + 2 * 4}
    assert report["chat"]["num_encoded"] == 1
    assert {len(times) for times in report["chat"]["first_token_seconds"].values()} == {report["chat"]["turns"]} == {3}
    neighbours = report["neighbours"]
    assert neighbours["ratio"] > 0 and neighbours["processor_ratio"] > 0 and neighbours["picture_share"] > 0
    assert neighbours["pairs"] == 12
    assert "encoded 1 time." in console.file.getvalue()  # type: ignore[attr-defined]


def test_peers_that_say_something_else_are_found() -> None:
    one, other = images.ImageRun(1, 1, 1, (5, 6)), images.ImageRun(1, 1, 1, (6, 6))
    assert images._same([one, one], [one, other]) == 0.5
    with pytest.raises(InternalError, match="begin 0% of their answers alike"):
        images._same([one], [other])
