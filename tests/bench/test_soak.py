"""The soak benchmark: rounds with a real server, and slopes that distinguish growth from noise."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from dev.bench.soak import ROUNDS, SETTINGS, SoakOutcome, figures, slopes, soak


def test_a_slope_tells_growth_from_noise() -> None:
    samples = [{"time": 60.0 * minute, "grows": 5.0 * minute, "is_flat": minute % 2} for minute in range(20)]
    found = slopes(samples)
    assert found["grows"] == pytest.approx(5.0)
    assert abs(found["is_flat"]) < 0.1
    assert slopes(samples[:2]) == {}


def test_an_outcome_has_json() -> None:
    found = figures(SoakOutcome(rounds=Counter({"full disk": 2}), statuses=Counter({"200": 3})))
    assert json.loads(json.dumps(found))["rounds"] == {"full disk": 2}


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_server_recovers_from_each_loss(setting: str) -> None:
    arguments = SETTINGS[setting]
    names = [name for name in ROUNDS if arguments or "shard" not in name]
    found = soak(0.0, names, arguments)
    assert set(found.rounds) == set(names)
    assert (found.wrong, found.left) == ([], [])
    assert found.statuses["200"] > 0
    assert found.samples[-1]["shared_memory"] == 0
    assert found.samples[-1]["temporary_files"] <= found.samples[0]["temporary_files"]
