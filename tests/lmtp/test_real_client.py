"""The unmodified LMQL 0.7.3, in its own virtual environment, runs every kind of query with bridle's server.

BRIDLE_LMQL_ENV names a folder that keeps the environment for later runs.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from bridle.demo import demo_model_path
from tests.lmtp.real_client.programs import python, run_program, serving  # noqa: F401 -- a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
QUERIES = Path(__file__).parent / "real_client" / "queries.py"
START = "Once upon a time"


def ask(python: Path, folder: Path, endpoint: str, *names: str) -> dict[str, Any]:  # noqa: F811
    """Return the result of each query. The model's folder is a tokenizer that LMQL loads without a network."""
    words = (endpoint, "demo", str(demo_model_path()), str(folder / "certificate.json"), *names)
    return run_program(python, folder, QUERIES, *words)


@pytest.fixture(scope="module", params=["serve-model", "serve"])
def results(
    request: pytest.FixtureRequest,
    python: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Return the results of all queries, with both commands that serve a model."""
    with serving(request.param, "demo", "--port", "0") as endpoint:
        return ask(python, tmp_path_factory.mktemp("queries"), endpoint)


@pytest.fixture(scope="module")
def story() -> str:
    """Return the greedy output of the same model without LMQL."""
    from bridle import LLM, SamplingParams

    with LLM("demo") as llm:
        return llm.generate([START], SamplingParams(max_tokens=40, temperature=0.0))[0].text


def test_no_query_fails(results: dict[str, Any]) -> None:
    errors = {name: value["error"] for name, value in results.items() if isinstance(value, dict) and "error" in value}
    assert not errors
    assert len(results) == 15


def test_limits_and_stops_cut_greedy_output(results: dict[str, Any], story: str) -> None:
    stop = results["stops_at"]
    assert stop.endswith(".") and stop.count(".") == 1 and story.startswith(stop)
    assert story.startswith(results["token_limit"]) and len(results["token_limit"]) > 20
    assert story.startswith(results["lower_limit"]) and len(results["lower_limit"]) < len(results["token_limit"])


def test_constraints_hold(results: dict[str, Any]) -> None:
    assert results["one_of"] in (" good", " bad", " terrible")
    assert isinstance(results["integer"], int)
    assert "e" not in results["excluded"] and results["excluded"]
    names, last = results["scripted"]
    assert len(names) == 3 and last in (" a cat", " a dog")


def test_distribution_and_scores_are_probabilities(results: dict[str, Any]) -> None:
    shares = dict(results["distribution"])
    assert set(shares) == {" good", " bad"}
    assert sum(shares.values()) == pytest.approx(1) and all(share > 0 for share in shares.values())
    assert sum(results["score"]) == pytest.approx(1)


def test_beams_are_distinct_and_allowed(results: dict[str, Any], story: str) -> None:
    assert len(set(results["beam"])) == 2 and set(results["beam"]) <= {" three", " four", " five"}
    assert len(set(results["free_beam"])) == 2
    assert len(results["sampled"]) == 2


def test_eight_queries_at_once_give_what_each_gives_alone(results: dict[str, Any]) -> None:
    from bridle import LLM, SamplingParams

    assert len(results["parallel"]) == 8
    with LLM("demo") as llm:
        alone = llm.generate(["Once"], SamplingParams(max_tokens=11, temperature=0.0))[0].text
    assert results["parallel"][0] == alone


def test_certificate_names_the_model(results: dict[str, Any]) -> None:
    event = results["certificate"]["events"][0]
    assert event["name"] == "lmtp.generate"
    assert event["data"]["model"]["model"] == "demo" and event["data"]["model"]["model_type"] == "bridle"


def test_it_is_found_where_lmql_looks(python: Path, tmp_path: Path, story: str) -> None:  # noqa: F811
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", 8080))
        except OSError:
            pytest.skip("port 8080 is taken")
    with serving("serve-model", "demo"):
        results = ask(python, tmp_path, "", "token_limit")
    assert story.startswith(results["token_limit"])
