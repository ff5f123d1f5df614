"""Tests of the engine's properties with an executor in a shard or in two ranks, and with two engines and a router."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.conftest import IS_FULL
from tests.distributed.ways import WAYS, OneShard, Way
from tests.engine import engine_properties, fork_properties, rewind_properties
from tests.engine.support import Lab, alone, make_request

pytestmark = pytest.mark.few(3)  # each way once; `tests/engine` has all cases in this process


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every property runs with every setup. Tests of engine settings, forks and rollbacks run only with the first
    setup, unless all tests are requested."""
    name, _, module = metafunc.definition.name.partition("__")
    is_property = module in ("engine_properties", "") and name != "test_no_knob_changes_an_output"
    ways = [
        key for key, way in WAYS.items() if name not in way.looks_inside and (is_property or IS_FULL or way is OneShard)
    ]
    metafunc.parametrize("way", ways, indirect=True, scope="module")


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    made = WAYS[request.param]()
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _through(way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each lab of a test use the setup."""
    way.enter(monkeypatch)
    yield
    way.leave()


def again(invariant: Callable[..., None]) -> Any:
    """Return a property test of the engine, with a number of examples that is suitable for streams."""
    test = getattr(invariant, "hypothesis", None)
    if test is None:
        return invariant
    few = settings(max_examples=100 if IS_FULL else 2)
    fresh = few(given(**test._given_kwargs)(test.inner_test))
    # Behind a shard devices are waited for, whether they answer late or not.
    marks = [mark for mark in getattr(invariant, "pytestmark", []) if mark != engine_properties.LABS.mark]
    at_once = pytest.mark.parametrize("kind", [Lab]).mark
    fresh.pytestmark = marks if marks == invariant.pytestmark else [*marks, at_once]
    return fresh


for module in (engine_properties, fork_properties, rewind_properties):
    for name, invariant in vars(module).items():
        if name.startswith("test_"):
            globals()[f"{name}__{module.__name__.rpartition('.')[2]}"] = again(invariant)


def test_vectors_are_those_of_an_engine_here(way: Way) -> None:
    """The texts are computed in one step and in several steps, next to tokens of other requests, with little memory."""
    lab = Lab(vocab_size=8, num_blocks=16, embedding_size=5, max_num_batched_tokens=7)
    prompts = [[number % 8 for number in range(length)] for length in (1, 3, 8, 20, 33)]
    texts = [make_request(prompt, max_tokens=1, embeds=True) for prompt in prompts]
    *found, continued = lab.run(*texts, make_request(prompts[3], max_tokens=6))
    assert [one.first.vector for one in found] == [alone(prompt) for prompt in prompts]
    assert continued.first.vector is None and len(continued.first.tokens) == 6


def test_the_properties_ran_that_way(way: Way) -> None:
    before = way.num_steps
    Lab().run_one(max_tokens=5)
    assert way.num_steps >= before + 5
