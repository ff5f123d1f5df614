"""The benchmark of embeddings: its peers give the same vectors, and padding is counted. Times are never asserted."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bridle.bench import BenchSettings
from bridle.bench.run import measured
from bridle.errors import InternalError
from dev.bench import embeddings


def test_peers_give_the_same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SHAPES", {"mini": (1, 32, 2)})
    monkeypatch.setattr(embeddings, "make_texts", lambda count: [[1_000 + n] * (3 + n % 5) for n in range(12)])
    console = Console(file=io.StringIO(), width=120)
    report, _ = measured(embeddings, BenchSettings(quick=True, batches=(5,)), console)
    figures = report["figures"]
    assert [each["peer"] for each in figures] == ["padded, 5 at once", "padded, 5 at once, sorted", "bridle"]
    assert figures[0]["padding"] > figures[1]["padding"] > figures[2]["padding"] == 0.0
    assert "BERT mini: 12 texts of 5 tokens" in console.file.getvalue()  # type: ignore[attr-defined]


def test_padding_is_what_no_text_needs() -> None:
    assert embeddings.padding([[1] * 4, [1] * 2], 2) == pytest.approx(0.25)
    assert embeddings.padding([[1] * 4, [1] * 2], 1) == 0.0
    assert embeddings.make_texts(8) == embeddings.make_texts(8)


def test_other_vectors_are_no_figure() -> None:
    with pytest.raises(InternalError, match=r"differ by up to 0\.5"):
        embeddings.check_same("x", [[0.5]], [[1.0]])
