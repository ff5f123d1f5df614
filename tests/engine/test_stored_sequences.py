"""Tests of KV of whole sequences in a store: tokens are the same with and without the store, and stored tokens are not
computed again."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.errors import ShardUnavailable
from bridle.kv_store import BlockStore, SegmentStore, forget_tenant
from bridle.kv_store.store import list_segments
from tests.engine.programs import VOCAB
from tests.engine.random_labs import SEED
from tests.engine.store_lab import BLOCK, LIMIT, num_cached, prompt_of, run_failing
from tests.engine.support import Lab, check_against_reference, make_request
from tests.kv_store.kit import DAMAGES, damage
from tests.waiting import PATIENCE


class SequenceLab(Lab):
    """A lab with a store, whose executor keeps KV by sequence. Steps wait until all data is written."""

    def __init__(self, folder: Path, *, is_cuttable: bool = True, limit: int = LIMIT, **options: Any) -> None:
        self.folder, self.is_cuttable, self.limit = folder, is_cuttable, limit
        super().__init__(kv="sequences", block_size=BLOCK, **{"num_blocks": 40, "vocab_size": 50, **options})

    def make_one(self, config: EngineConfig) -> Engine:
        self.executor.sequence_states.is_cuttable = self.is_cuttable
        self.store = BlockStore(SegmentStore(self.folder, self.executor.sequence_states.identity(), self.limit))
        executor, pools = self.connect(self.executor), self.pools
        return Engine(executor, config, pools=pools, decoder=self.decoder, clock=self.clock, store=self.store)

    def step(self) -> list[Any]:
        events = super().step()
        assert self.store.flush(time.monotonic() + PATIENCE)
        return events

    def restart(self, **options: Any) -> SequenceLab:
        self.engine.close()
        return SequenceLab(self.folder, is_cuttable=self.is_cuttable, **options)


@pytest.mark.parametrize("is_cuttable", [True, False])
def test_the_next_turn_computes_only_new_tokens(tmp_path: Path, is_cuttable: bool) -> None:
    lab, tokens, length = SequenceLab(tmp_path, is_cuttable=is_cuttable), prompt_of(1), 0
    for turn in range(5):
        replay = lab.run_one(tokens, max_tokens=20)
        assert num_cached(replay) == length
        length = len(tokens) + 19  # the last token was sampled, not computed
        tokens = [*tokens, *replay.first.tokens, turn, turn]
        if turn % 2:
            lab = lab.restart()
    assert lab.engine.statistics().num_restored_tokens > 0
    lab.engine.close()


def test_a_part_of_a_sequence_is_read_where_kv_can_be_cut(tmp_path: Path) -> None:
    for is_cuttable, found in ((True, 22), (False, 0)):
        lab = SequenceLab(tmp_path / str(is_cuttable), is_cuttable=is_cuttable)
        lab.run_one(prompt_of(1), max_tokens=1)
        before = lab.executor.num_computed_tokens
        assert num_cached(lab.run_one([*prompt_of(1)[:22], 1, 2, 3], max_tokens=1)) == found
        assert lab.executor.num_computed_tokens - before == 25 - found
        lab.engine.close()


def test_what_is_stored_almost_as_far_is_not_stored_again(tmp_path: Path) -> None:
    lab = SequenceLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    first = lab.engine.statistics().num_stored_bytes
    lab.run_one(prompt_of(1), max_tokens=8)
    assert lab.engine.statistics().num_stored_bytes == first > 0
    lab.run_one(prompt_of(1), max_tokens=25)
    assert lab.engine.statistics().num_stored_bytes > first
    lab.engine.close()


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"adapter": "x"}, {"tenant": "", "adapter": None}])
def test_no_other_tenant_adapter_or_model_finds_a_sequence(tmp_path: Path, other: dict[str, Any]) -> None:
    lab = SequenceLab(tmp_path)
    lab.run_one(prompt_of(1), tenant="a", max_tokens=1)
    assert num_cached(lab.run_one(prompt_of(1), max_tokens=1, **other)) == 0
    changed = lab.restart(seed=1)
    assert num_cached(changed.run_one(prompt_of(1), tenant="a", max_tokens=1)) == 0
    changed.engine.close()


def test_a_forgotten_user_computes_again(tmp_path: Path) -> None:
    lab = SequenceLab(tmp_path)
    for tenant in "ab":
        lab.run_one(prompt_of(1), tenant=tenant, max_tokens=1)
    assert forget_tenant(tmp_path, "a") == 1 + 1 + 7  # the KV, its record, and a pointer for each block
    lab = lab.restart()
    assert [num_cached(lab.run_one(prompt_of(1), tenant=tenant, max_tokens=1)) for tenant in "ab"] == [0, 29]
    lab.engine.close()


def test_a_sequence_whose_kv_is_damaged_is_computed_and_stored_anew(tmp_path: Path) -> None:
    lab = SequenceLab(tmp_path)
    want = lab.run_one(prompt_of(1), max_tokens=4)
    lab.engine.close()
    (path,) = (path for path, _, _ in list_segments(tmp_path))
    content = bytearray(path.read_bytes())
    content[200] ^= 1  # of the KV, which comes first
    path.write_bytes(content)
    lab = SequenceLab(tmp_path)
    for found in (0, 29):
        got = lab.run_one(prompt_of(1), max_tokens=4)
        assert (got.first.tokens, num_cached(got)) == (want.first.tokens, found)
    lab.engine.close()


@given(seed=SEED)
def test_tokens_are_the_same_whatever_the_store_does(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Random requests have controllers, forks, rollbacks and preemptions. Files are damaged, and a device is lost."""
    from tests.engine.store_lab import run_random

    folder, random = tmp_path_factory.mktemp("store"), Random(seed)
    options: dict[str, Any] = {"is_cuttable": random.random() < 0.5, "limit": random.choice([0, 40_000, LIMIT])}
    for _ in range(3):
        faults = {random.randrange(40): ShardUnavailable("the device went away")} if random.random() < 0.3 else {}
        lab = SequenceLab(folder, vocab_size=VOCAB, num_blocks=random.choice([12, 40]), faults=faults, **options)
        if faults:
            run_failing(lab)  # type: ignore[arg-type]
        else:
            run_random(lab, random, 5)  # type: ignore[arg-type]
        lab.engine.close()
        assert sum(size for _, size, _ in list_segments(folder)) <= options["limit"]
        for path, _, _ in list(list_segments(folder)):
            if random.random() < 0.3:
                damage(path, random.choice(DAMAGES), random.randrange(1 << 30))


def test_a_preempted_sequence_continues_from_what_it_has_stored_or_computes(tmp_path: Path) -> None:
    lab = SequenceLab(tmp_path, num_blocks=14)
    lab.run_one(prompt_of(1), max_tokens=1)
    requests = [make_request([*prompt_of(1), number], max_tokens=12) for number in range(3)]
    for request, replay in zip(requests, lab.run(*requests), strict=True):
        check_against_reference(lab, request, replay)
    lab.engine.close()
