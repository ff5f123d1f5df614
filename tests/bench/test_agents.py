"""The benchmark of agents: what each way to run them computes. Times are never asserted."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bridle.bench import BenchSettings
from bridle.bench.run import measured
from dev.bench import agents, agents_peer


@pytest.mark.slow
def test_parked_kv_computes_a_block_a_call_again_and_the_inside_nothing() -> None:
    console = Console(file=io.StringIO(), width=160)
    report, _ = measured(agents, BenchSettings(quick=True), console)
    twice = {(each["cache"], each["way"]): each["computed_twice"] for each in report["figures"]}
    num_calls = report["agents"] * report["calls"]
    for cache in ("large", "scarce"):
        assert twice[cache, "inside the engine"] == 0
        assert 0 <= twice[cache, "client, parked KV"] <= 16 * num_calls
        assert twice[cache, "client, no cache"] > 96 * num_calls
    if agents_peer.is_there():
        assert twice["large", agents_peer.NAME] == 0
        assert 0 < twice["scarce", agents_peer.NAME] < twice["scarce", "client, no cache"]
    assert {each["park_hits"] for each in report["figures"] if each["way"] == "client, parked KV"} == {num_calls}
    assert "3 agents of 2 calls over 96 tokens" in console.file.getvalue()  # type: ignore[attr-defined]
