"""Tests that the dashboard in deploy/ queries only metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from bridle.http import create_app
from bridle.serving import ModelRegistry
from tests.http.harness import scripted_model

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "bridle.json"
_NAME = re.compile(r"\b(?:bridle|gen_ai|tgi)_[a-z_]+")
_LABELS = re.compile(r"(\w+)\s*=~?\s*\"|by \((\w+)\)")


def expressions(node: Any) -> Iterator[str]:
    """Yield all queries in a dashboard, at any depth."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Return the names of all metric samples of a server, with their labels."""
    model = scripted_model()
    model.control = SimpleNamespace(is_ready=True, num_restarts=0, close=lambda: None)  # type: ignore[assignment]
    client = TestClient(create_app(ModelRegistry([model])))
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()
    text = client.get("/metrics").text
    model.control = None
    model.close()
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_each_metric_of_the_board_is_there_with_its_labels(known: dict[str, set[str]]) -> None:
    board = json.loads(BOARD.read_text())
    asked = [text for text in expressions(board) if _NAME.search(text)]
    assert len(asked) > 30
    for text in asked:
        names = _NAME.findall(text)
        assert set(names) <= known.keys(), text
        labels = {one or other for one, other in _LABELS.findall(text)}
        for name in names:
            assert labels <= known[name], text


def test_all_metrics_of_traces_are_on_the_board(known: dict[str, set[str]]) -> None:
    shown = {name for text in expressions(json.loads(BOARD.read_text())) for name in _NAME.findall(text)}
    assert {name for name in known if "trace" in name} <= shown


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        ids.add(panel["id"])
    assert len(ids) == len(json.loads(BOARD.read_text())["panels"])
