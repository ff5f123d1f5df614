"""Step plans stay as they are, byte for byte, for models whose layers are all attention."""

from __future__ import annotations

from hashlib import sha256
from random import Random

import pytest

from bridle.distributed.codec.step_plan import encode_plan
from tests.engine.random_labs import random_lab, random_request, run_staggered

#: Hashes of all plans of random workloads, by seed: with cramped pools, forks, rewinds, drafts, adapters and retries.
RECORDED = {1: "5f0e94b1b5d503c6", 5: "9aba26fe612199c0", 8: "f433ca411261ac52"}


@pytest.mark.parametrize("seed", RECORDED)
def test_plans_of_a_recorded_workload_have_the_same_bytes(seed: int) -> None:
    random = Random(seed)
    lab = random_lab(random, "paged", record=True)
    run_staggered(lab, [random_request(random, id=f"r{number}") for number in range(12)], random)
    plans = [encode_plan(plan).SerializeToString(deterministic=True) for plan in lab.executor.plans]
    assert sha256(b"".join(plans)).hexdigest()[:16] == RECORDED[seed]
