"""The benchmark of scripts: each of its scripts runs, forks into as many as it should, and gives all figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridle.aici.client import RuntimePool
from bridle.bench import BenchSettings
from bridle.bench import control_guests as guests
from bridle.bench.control_device import runtime_pool
from bridle.controllers.standard import names
from dev.bench import controllers

VOCAB_SIZE = 32_000  # that of the device which computes nothing


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimePool]:
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = guests.write_tokenizer(folder / "tokenizer", VOCAB_SIZE)
    with runtime_pool(tokenizer, folder / "store", VOCAB_SIZE, *controllers._LIMITS) as pool:
        yield pool


@pytest.mark.parametrize(
    "language",
    ["JavaScript", pytest.param("Python", marks=pytest.mark.slow)],  # its interpreter compiles for long
)
def test_scripts_start_run_and_fork(pool: RuntimePool, language: str) -> None:
    script = controllers.SCRIPTS[language]
    assert script.controller in names()
    started = controllers._starts(pool, script, 5)
    assert started["compile_seconds"] > 0 and started["start_worst_milliseconds"] >= started["start_milliseconds"] > 0
    step = controllers._steps(pool, script, 3, 0.0, BenchSettings(quick=True))
    assert 0 < step["drawing"] <= 3 and step["cpu_microseconds_of_each"] >= 0
    fork = controllers._forks(pool, script, 3)
    assert fork["branches"] == 3 and fork["fork_milliseconds"] > fork["each_milliseconds"] > 0
