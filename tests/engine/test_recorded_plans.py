"""Tests that step plans of models with only attention layers equal the recorded plans, byte for byte."""

from __future__ import annotations

from hashlib import sha256
from random import Random

import pytest

from bridle.distributed.codec.step_plan import encode_plan
from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sampling import sample_planner
from tests.engine.random_labs import essence, random_lab, random_request, run_staggered

#: Hashes of all plans of random workloads, by seed: with cramped pools, forks, rewinds, drafts, adapters and retries.
RECORDED = {1: "5f0e94b1b5d503c6", 5: "9aba26fe612199c0", 8: "c0c3f8714ada0a05"}


@pytest.mark.parametrize("seed", RECORDED)
def test_plans_of_a_recorded_workload_have_the_same_bytes(seed: int) -> None:
    random = Random(seed)
    lab = random_lab(random, "paged", record=True)
    run_staggered(lab, [random_request(random, id=f"r{number}") for number in range(12)], random)
    plans = [encode_plan(plan).SerializeToString(deterministic=True) for plan in lab.executor.plans]
    assert sha256(b"".join(plans)).hexdigest()[:16] == RECORDED[seed]


def _run(seed: int) -> list[object]:
    """Return the plans, batches and outputs of a random workload. Half of its sequences have no controller."""
    random = Random(seed)
    lab = random_lab(random, "paged", record=True)
    plain: dict[str, object] = {"controller": None, "trace": False, "min_tokens": 0, "bad_words_ids": (), "n": 1}
    requests = [random_request(random, id=f"r{i}", seed=i, **(plain if i % 2 else {})) for i in range(10)]
    replays = run_staggered(lab, requests, random)
    return [lab.executor.plans, lab.executor.batches, essence(replays, requests)]


@pytest.mark.parametrize("seed", range(4))
def test_the_short_way_of_plain_sequences_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    append, can_append = OutputProcessor.append_plain, BlockManager.can_append
    monkeypatch.setattr(OutputProcessor, "append_plain", lambda *given: used.add("text") or append(*given))
    monkeypatch.setattr(BlockManager, "can_append", lambda *given: used.add("blocks") or can_append(*given))
    short = _run(seed)
    assert used == {"text", "blocks"}
    monkeypatch.setattr(sample_planner, "draws_plainly", lambda seq: False)
    monkeypatch.setattr(BlockManager, "can_append", lambda manager, seq: False)
    assert _run(seed) == short
