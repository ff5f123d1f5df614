"""Tests that many scripts at once, each in a process of its own and more than there are processors, all end well."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.outputs import FinishReason
from tests.aici.conftest import BOS, VOCAB_SIZE, tokenizer  # noqa: F401 -- a fixture
from tests.controllers.pykit import Scripts

SOURCE = textwrap.dedent(
    """
    import pyaici.server as aici

    async def main():
        await aici.FixedTokens("begin ")
        for number in range(6):
            await aici.gen_tokens(regex="[a-z]+ ", max_tokens=4)
            sum(i * i for i in range(3000))
        print("well")

    aici.start(main())
    """
)


@pytest.fixture
def pool(tokenizer: Path, py_store: Path) -> Iterator[RuntimePool]:  # noqa: F811
    """Yield a runtime with a server's limits, except for a longer time to compile."""
    arguments = ("--store", str(py_store), "--limit", "max_prepare_wait=800000")
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=arguments), VOCAB_SIZE)
    yield pool
    pool.shutdown()


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_a_crowd_of_scripts_ends_well(pool: RuntimePool, count: int) -> None:
    scripts = Scripts(pool, "pyctrl", ["begin many words follow one another here "], step_timeout=0.02)
    names = [f"script {number}" for number in range(count)]
    for name in names:
        scripts.add_module(name, "pyctrl", SOURCE, max_tokens=200, prompt=(BOS,))
    scripts.run()
    errors = {name: scripts.end(name).error for name in names}
    assert not any(errors.values()), errors
    assert {scripts.end(name).reason for name in names} == {FinishReason.CONTROLLER}
    assert {scripts.logs(name).splitlines()[-1] for name in names} == {"well"}
