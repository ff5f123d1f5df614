"""`bridle ps` lists the models that a running server has loaded."""

from __future__ import annotations

import json

import pytest

from bridle.cli import main
from bridle.config import ModelConfig
from bridle.serving import ModelRegistry
from bridle.serving.models.model_slot import Slot
from tests.http.harness import serving
from tests.serving.fakes import fake_model


def test_what_is_loaded_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    registry = ModelRegistry([fake_model(name="mine")])
    registry.add_slot(Slot("later", ModelConfig("demo")))
    with serving(registry) as url:
        assert main(["ps", "--url", url]) == 0
        titles, *lines = [line.split() for line in capsys.readouterr().out.splitlines() if "route=" not in line]
        assert main(["ps", "--url", url, "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert titles == ["NAME", "STATE", "TASK", "CONTEXT", "BASE"]
    assert [line[:2] for line in lines] == [["mine", "loaded"]]
    assert [(row["id"], row["state"]) for row in rows if "state" in row] == [("mine", "loaded")]


def test_no_server_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
