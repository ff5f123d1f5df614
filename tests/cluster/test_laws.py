"""The engine's laws, unchanged, with the executor behind a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from bridle.cluster.remote import ShardExecutor
from bridle.engine.interfaces import Executor
from bridle.testing.scripted import ScriptedExecutor
from tests.cluster.kit import Host, hosted
from tests.conftest import IS_FULL
from tests.engine import test_forks, test_laws, test_rewind
from tests.engine.support import Lab


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosted(ScriptedExecutor()) as made:
        yield made


@pytest.fixture(autouse=True)
def _through_a_shard(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each engine of a test gets a stream to the shard; the one before it has let go by then."""
    open_ones: list[ShardExecutor] = []

    def connect(executor: Executor) -> Executor:
        while open_ones:
            open_ones.pop().close()
        host.wait_free()
        open_ones.append(host.connect(executor))
        return open_ones[0]

    monkeypatch.setattr(Lab, "connect", staticmethod(connect))
    yield
    while open_ones:
        open_ones.pop().close()


def again(law: Callable[..., None]) -> Any:
    """A law of the engine with as many examples as suit a stream."""
    test = getattr(law, "hypothesis", None)
    if test is None:
        return law
    few = settings(max_examples=100 if IS_FULL else 5)
    fresh = few(given(**test._given_kwargs)(test.inner_test))
    fresh.pytestmark = getattr(law, "pytestmark", [])
    return fresh


for module in (test_laws, test_forks, test_rewind):
    for name, law in vars(module).items():
        if name.startswith("test_"):
            globals()[f"{name}__{module.__name__.rpartition('.')[2]}"] = again(law)


def test_the_laws_ran_on_the_shard(host: Host) -> None:
    lab = Lab()
    before = host.shard.num_steps
    lab.run_one(max_tokens=5)
    assert host.shard.num_steps == before + 5
