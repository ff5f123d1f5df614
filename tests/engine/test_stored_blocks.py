"""KV blocks in a store: tokens are the same with and without it, and what is stored is not computed again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.engine.kv.stored_blocks import IDLE_SECONDS
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, ShardUnavailable
from bridle.kv_store import BlockStore, Load, LoadedBlock, SegmentStore, forget_tenant
from bridle.kv_store.store import list_segments
from bridle.outputs import Event, Finished
from bridle.serving.models.kv_store import open_store
from bridle.testing.async_executor import LateScriptedExecutor
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.programs import VOCAB
from tests.engine.random_labs import SEED, random_request
from tests.engine.support import Lab, Replay, check_against_reference, make_request
from tests.kv_store.kit import DAMAGES, damage
from tests.waiting import PATIENCE, until

BLOCK = 4
LIMIT = 1 << 20


class StoreLab(Lab):
    """A lab with a store. A step waits for what is being read, so that steps with nothing to do are few."""

    def __init__(self, folder: Path, *, limit: int = LIMIT, waits: bool = True, **options: Any) -> None:
        self.folder, self.limit, self.waits = folder, limit, waits
        super().__init__(block_size=BLOCK, **{"num_blocks": 24, "vocab_size": 50, **options})

    def make_one(self, config: EngineConfig) -> Engine:
        executor = self.connect(self.executor)
        blocks = self.executor.kv_blocks
        self.store = BlockStore(SegmentStore(self.folder, blocks.identity(), self.limit))
        pools = self.pools
        return Engine(executor, config, pools=pools, decoder=self.decoder, clock=self.clock, store=self.store)

    def step(self) -> list[Event]:
        events = super().step()
        stored = self.engine.stored
        assert stored is not None
        if self.waits:
            until(lambda: all(each.load.is_done for each in stored.loads), "what is being read")
        elif stored.is_loading:
            time.sleep(0.0005)  # a bounded number of steps waits for it
        return events

    def settle(self) -> None:
        assert self.store.flush(time.monotonic() + PATIENCE)

    def restart(self) -> StoreLab:
        """Close the engine, and start another one over the same store."""
        self.engine.close()
        return StoreLab(self.folder, limit=self.limit)


def prompt_of(number: int, length: int = 30) -> list[int]:
    return [(number * 31 + i * i) % 50 for i in range(length)]


def flood(lab: Lab, tenant: str = "others") -> None:
    """Fill the cache with prompts of somebody else."""
    for i in range(4):
        lab.run(make_request([i, *prompt_of(1000 + i, 60)], tenant=tenant, max_tokens=1))


def num_cached(replay: Replay) -> int:
    return replay.first.usage.cached_tokens


# -- what is found ---------------------------------------------------------------------------------------------


def test_what_was_evicted_is_read_instead_of_computed(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path)
    first = lab.run_one(prompt_of(1), max_tokens=4)
    flood(lab)
    lab.settle()
    before = lab.executor.num_computed_tokens
    again = lab.run_one(prompt_of(1), max_tokens=4)
    assert again.first.tokens == first.first.tokens
    assert num_cached(again) == 28
    assert lab.executor.num_computed_tokens - before == 2 + 3
    statistics = lab.engine.statistics()
    assert statistics.num_restored_tokens == 28
    assert statistics.num_restored_bytes == 7 * lab.executor.kv_blocks.block_bytes
    assert statistics.num_stored_blocks == statistics.num_blocks_in_store >= 7
    assert statistics.num_store_drops == 0
    lab.engine.close()


def test_the_next_turn_after_a_restart_computes_only_new_tokens(tmp_path: Path) -> None:
    lab, tokens, length = StoreLab(tmp_path), prompt_of(1), BLOCK
    for turn in range(6):
        replay = lab.run_one(tokens, max_tokens=5)
        assert num_cached(replay) >= length - BLOCK
        length = len(tokens) + 4  # the last token was sampled, not computed
        tokens = [*tokens, *replay.first.tokens, turn, turn]
        lab = lab.restart()
    lab.engine.close()


def test_an_idle_engine_writes_what_is_in_memory(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path)
    assert lab.engine.rest() is None
    lab.run_one(prompt_of(1, 60), max_tokens=1)
    assert lab.engine.rest() == IDLE_SECONDS
    lab.clock.advance(IDLE_SECONDS - 1)
    assert lab.engine.rest() == pytest.approx(1.0)
    assert lab.engine.statistics().num_blocks_in_store == 0
    lab.run_one([*prompt_of(1, 60), 1], max_tokens=1)
    assert lab.engine.rest() == IDLE_SECONDS  # the time begins anew
    lab.clock.advance(IDLE_SECONDS)
    while lab.engine.rest() is not None:
        assert lab.store.num_dropped == 0
    lab.settle()
    killed = StoreLab(tmp_path)  # the first engine was never closed
    assert num_cached(killed.run_one([*prompt_of(1, 60), 1], max_tokens=1)) == 60
    for each in (killed, lab):
        each.engine.close()


def test_blocks_in_memory_come_before_those_in_the_store(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab = lab.restart()
    lab.run_one(prompt_of(1)[:12], max_tokens=1)
    assert num_cached(lab.run_one(prompt_of(1), max_tokens=1)) == 28
    assert lab.engine.statistics().num_restored_tokens == 8 + 16  # the third block was computed
    lab.engine.close()


def test_several_prompts_with_one_beginning_read_it_once(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path, num_blocks=64)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab = lab.restart()
    replays = lab.run(*(make_request([*prompt_of(1), 7, number], max_tokens=2) for number in range(2)))
    assert [num_cached(each) for each in replays] == [28, 28]
    assert lab.engine.statistics().num_restored_tokens == 28
    lab.engine.close()


class HeldLoads:
    """Loads of a lab that do not begin by themselves."""

    def __init__(self, lab: StoreLab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[Load] = []
        self._read, lab.waits = lab.store.load, False
        monkeypatch.setattr(lab.store, "load", self._load)

    def _load(self, blocks: Seq[LoadedBlock], is_behind: bool) -> Load:
        self.loads.append(Load(blocks))
        return self.loads[-1]

    def end(self) -> None:
        """Read all of them now."""
        for load in self.loads:
            real = self._read(load.blocks)
            until(lambda real=real: real.is_done, "the load")  # type: ignore[misc]
            load.num_loaded, load.is_done = real.num_loaded, True


def test_what_is_read_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab = lab.restart()
    held = HeldLoads(lab, monkeypatch)
    slow, other = make_request(prompt_of(1), max_tokens=3), make_request(prompt_of(2), max_tokens=3)
    lab.engine.add(slow)
    lab.step()
    lab.engine.add(other)
    for _ in range(5):
        lab.step()
    assert any(event.request_id == other.id and isinstance(event, Finished) for event in lab.events)
    assert lab.engine.is_stalled
    assert not any(event.request_id == slow.id for event in lab.events)
    held.end()
    assert num_cached(lab.drain()[slow.id]) == 28
    lab.engine.close()


def test_the_beginning_in_memory_stays_while_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab = lab.restart()
    lab.run_one(prompt_of(1)[:12], max_tokens=1)
    held = HeldLoads(lab, monkeypatch)
    slow = make_request(prompt_of(1), max_tokens=3)
    lab.engine.add(slow)
    for number in range(3):
        lab.engine.add(make_request([number, *prompt_of(2, 50)], max_tokens=1))
        for _ in range(4):
            lab.step()
    held.end()
    assert num_cached(lab.drain()[slow.id]) == 28
    lab.engine.close()


def test_what_is_read_while_all_kv_is_lost_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab.engine.close()
    lab = StoreLab(tmp_path, faults={2: ShardUnavailable("the device went away")})
    lab.run_one(prompt_of(1)[:12], max_tokens=1)
    held = HeldLoads(lab, monkeypatch)
    slow, other = make_request(prompt_of(1), max_tokens=3), make_request(prompt_of(2), max_tokens=3)
    lab.engine.add(slow)
    lab.engine.add(other)
    for _ in range(3):
        lab.step()
    assert lab.engine.statistics().num_failed_steps == 1
    first = held.loads[0]
    first.num_loaded, first.is_done = len(first.blocks), True  # into blocks that the loss has cleared
    lab.step()
    assert lab.engine.statistics().num_restored_tokens == 8  # of the first prompt alone
    held.loads.remove(first)
    held.end()
    for request in (slow, other):
        check_against_reference(lab, request, lab.drain()[request.id])
    lab.engine.close()


def test_a_request_that_is_cancelled_while_it_is_read_for_leaves_nothing(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab = lab.restart()
    gone = make_request(prompt_of(1), max_tokens=3)
    lab.engine.add(gone)
    lab.step()
    lab.engine.cancel(gone.id)
    lab.step()
    replay = lab.run_one(prompt_of(2), max_tokens=1)
    assert num_cached(replay) == 0
    assert num_cached(lab.run_one(prompt_of(1), max_tokens=1)) == 28
    lab.engine.close()


# -- who finds it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"adapter": "x"}, {"tenant": "", "adapter": None}])
def test_no_other_tenant_adapter_or_model_finds_a_block(tmp_path: Path, other: dict[str, Any]) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), tenant="a", max_tokens=1)
    lab = lab.restart()
    assert num_cached(lab.run_one(prompt_of(1), max_tokens=1, **other)) == 0
    lab.engine.close()
    changed = StoreLab(tmp_path, seed=1)
    assert num_cached(changed.run_one(prompt_of(1), tenant="a", max_tokens=1)) == 0
    changed.engine.close()


def test_a_forgotten_user_computes_again_and_others_do_not(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path, num_blocks=64)
    for tenant in "ab":
        lab.run_one(prompt_of(1), tenant=tenant, max_tokens=1)
    lab.engine.close()
    assert forget_tenant(tmp_path, "a") == 7
    lab = StoreLab(tmp_path)
    assert [num_cached(lab.run_one(prompt_of(1), tenant=tenant, max_tokens=1)) for tenant in "ab"] == [0, 28]
    lab.engine.close()


@pytest.mark.parametrize(
    ("executor", "config", "problem"),
    [
        (ScriptedExecutor(kv="sequences"), {}, "needs a model that torch computes on a CPU"),
        (LateScriptedExecutor(), {}, "needs a model that torch computes on a CPU"),
        (ScriptedExecutor(num_states=4), {}, "recurrent layers"),
        (ScriptedExecutor(), {"enable_prefix_caching": False}, "prefix caching"),
        (ScriptedExecutor(), {"kv_store_bytes": 100}, "kv_store_bytes is 100; a store of this model needs at least"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_unless_it_is_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: ScriptedExecutor, config: dict[str, Any], problem: str
) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    with pytest.raises(InvalidRequest, match=problem):
        open_store(executor, EngineConfig(kv_store=str(tmp_path), **config))
    assert open_store(executor, EngineConfig(kv_store="auto", **config)) is None
    assert open_store(executor, EngineConfig(**config)) is None
    opened = open_store(ScriptedExecutor(), EngineConfig(kv_store="auto"))
    assert opened is not None
    assert opened.store.folder == tmp_path / "kv"
    opened.close()


# -- whatever happens ------------------------------------------------------------------------------------------


def run_random(lab: StoreLab, random: Random, num_requests: int) -> None:
    """Run random requests, each of which must give what the reference gives."""
    requests: list[Request] = []
    for _ in range(num_requests):
        requests.append(random_request(random, max_tokens=random.choice([1, 4, 9])))
        lab.engine.add(requests[-1])
        for _ in range(random.choice([0, 1, 5])):
            lab.step()
    replays = lab.drain()
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


@given(seed=SEED, limit=st.sampled_from([0, 40_000, LIMIT]), waits=st.booleans())
def test_tokens_are_the_same_whatever_the_store_does(
    tmp_path_factory: pytest.TempPathFactory, seed: int, limit: int, waits: bool
) -> None:
    """Store small, full, cold or warm; files damaged in between; another engine over the same folder; a device
    that is lost. The scripted device checks each position that it reads."""
    folder, random = tmp_path_factory.mktemp("store"), Random(seed)
    options: dict[str, Any] = {"limit": limit, "vocab_size": VOCAB, "num_blocks": random.choice([12, 24, 64])}
    neighbour = StoreLab(folder, **options)
    for _ in range(random.randint(1, 3)):
        faults = {random.randrange(40): ShardUnavailable("the device went away")} if random.random() < 0.3 else {}
        lab = StoreLab(folder, faults=faults, **options)
        lab.waits = waits or bool(faults)
        try:
            if faults:
                run_failing(lab)
            else:
                run_random(lab, random, 5)
            run_random(neighbour, random, 2)
        finally:
            lab.engine.close()
        assert sum(size for _, size, _ in list_segments(folder)) <= limit
        for path, _, _ in list(list_segments(folder)):
            if random.random() < 0.3:
                damage(path, random.choice(DAMAGES), random.randrange(1 << 30))
    neighbour.engine.close()


def run_failing(lab: StoreLab) -> None:
    """Run prompts while all KV is lost once."""
    prompts = [[i % 3, *(token % VOCAB for token in prompt_of(i % 2, 20))] for i in range(5)]
    requests = [make_request(prompt, max_tokens=6) for prompt in prompts]
    for request, replay in zip(requests, lab.run(*requests), strict=True):
        check_against_reference(lab, request, replay)


def test_a_full_disk_costs_only_what_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(28, "No space left on device")

    lab = StoreLab(tmp_path)
    monkeypatch.setattr(os, "pwritev", full)
    first = lab.run_one(prompt_of(1), max_tokens=4)
    flood(lab)
    lab.settle()
    again = lab.run_one(prompt_of(1), max_tokens=4)
    assert (num_cached(again), again.first.tokens) == (0, first.first.tokens)
    statistics = lab.engine.statistics()
    assert statistics.num_store_drops > 0
    assert statistics.num_stored_blocks == 0
    lab.engine.close()
