"""The two policies that are compared differ in when tokens are computed, and in nothing else. Times are never
asserted."""

from __future__ import annotations

from bridle.config import EngineConfig
from bridle.engine import Engine
from bridle.testing.scripted import ScriptedExecutor
from dev.bench.prefill import POLICIES, Arrival, best, choose, run_load
from tests.engine.support import make_request


def test_both_policies_compute_the_same_tokens_and_one_is_sooner() -> None:
    config = EngineConfig(max_batch_prefill_tokens=16, enable_prefix_caching=False)
    engine = Engine(ScriptedExecutor(num_blocks=200, block_size=4), config)
    arrivals = [
        Arrival(0, make_request([1] * 320, max_tokens=1)),
        Arrival(2, make_request([2] * 8, max_tokens=2, ignore_eos=True)),
    ]
    found = {}
    for policy in POLICIES:
        choose(engine, policy)
        found[policy] = best([run_load(engine, arrivals) for _ in range(2)])
    old, new = found["oldest first"], found["shared"]
    assert (old.first_steps, new.first_steps) == (19, 1)
    assert old.tokens == new.tokens == 320 + 8 + 1
    assert 0 < old.first_seconds <= old.seconds
    engine.close()
