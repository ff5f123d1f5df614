"""Tests of the real LMQL 0.7.3 with adapters: a program chooses an adapter by its name instead of a model's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridle import LLM, SamplingParams
from bridle.demo import demo_model_path
from tests.lmtp.real_client.programs import python, run_program, serving  # noqa: F401 - a fixture
from tests.serving.fake_adapters import write_demo_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
QUERIES = Path(__file__).parent / "real_client" / "adapter_queries.py"
START = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_demo_adapter(root / "pirate", seed=1)
    write_demo_adapter(root / "later" / "clerk", seed=2)
    return root


@pytest.fixture(scope="module")
def results(python: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:  # noqa: F811
    """Return the results of all queries with one server, which loads the adapter `clerk` when a query names it."""
    flags = ("--adapter", f"pirate={folder / 'pirate'}", "--adapters-dir", str(folder / "later"))
    home = tmp_path_factory.mktemp("queries")
    with serving("serve-model", "demo", "--port", "0", *flags) as endpoint:
        names = ("demo", "pirate", "demo:pirate", "clerk", "tgi", "nobody", "demo:nobody")
        words = (endpoint, str(demo_model_path()), str(home / "certificate.json"), *names)
        return run_program(python, home, QUERIES, *words)


@pytest.fixture(scope="module")
def stories(folder: Path) -> dict[str | None, str]:
    """Return the greedy outputs of the same model without LMQL."""
    names = [None, "pirate", "clerk"]
    adapters = {"pirate": folder / "pirate", "clerk": folder / "later" / "clerk"}
    with LLM("demo", adapters=adapters) as llm:
        outputs = llm.generate([START] * 3, SamplingParams(max_tokens=11, temperature=0.0), adapter=names)
    return dict(zip(names, [output.text for output in outputs], strict=True))


def test_a_model_by_an_adapters_name_is_the_adapter(results: dict[str, Any], stories: dict[str | None, str]) -> None:
    told = results["stories"]
    assert len(set(stories.values())) == 3
    assert told["pirate"] == told["demo:pirate"] == stories["pirate"]
    assert told["clerk"] == stories["clerk"]
    assert told["demo"] == told["tgi"] == stories[None]


def test_an_unknown_name_is_an_error_of_the_query(results: dict[str, Any]) -> None:
    assert "'nobody' is not served here" in results["stories"]["nobody"]
    assert "no adapter 'nobody'" in results["stories"]["demo:nobody"]


def test_one_program_asks_both(results: dict[str, Any], stories: dict[str | None, str]) -> None:
    assert results["both"] == [stories[None], stories["pirate"]]
    assert results["scores"]["demo"] != results["scores"]["pirate"]


def test_certificates_name_the_adapter(results: dict[str, Any]) -> None:
    (event,) = [event for event in results["certificate"]["events"] if event["name"] == "lmtp.generate"][:1]
    assert (event["data"]["model"]["model"], event["data"]["model"]["adapter"]) == ("demo", "pirate")


def test_lmql_sends_no_option_of_that_name(results: dict[str, Any], stories: dict[str | None, str]) -> None:
    assert results["option"] == stories[None]
