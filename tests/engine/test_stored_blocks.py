"""KV blocks in a store: tokens are the same with and without the store, and stored tokens are not computed again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given

from bridle.config import EngineConfig
from bridle.engine.kv import stored_blocks
from bridle.engine.kv.stored_blocks import IDLE_SECONDS
from bridle.errors import InvalidRequest, ShardUnavailable
from bridle.kv_store import Load, LoadedBlock, forget_tenant
from bridle.kv_store.readers import PACE
from bridle.kv_store.records import HEADER_BYTES, state_key
from bridle.outputs import Finished
from bridle.serving.models.kv_store import open_store
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.random_labs import SEED
from tests.engine.store_lab import BLOCK, StoreLab, flood, num_cached, prompt_of
from tests.engine.support import check_against_reference, make_request, scheduler_of
from tests.waiting import until

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
    """A lab whose loads from the store begin only when the test starts them."""

    def __init__(self, lab: StoreLab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[Load] = []
        self._read, lab.waits = lab.store.load, False
        monkeypatch.setattr(lab.store, "load", self._load)

    def _load(self, blocks: Seq[LoadedBlock], is_beside: bool) -> Load:
        self.loads.append(Load(blocks))
        return self.loads[-1]

    def end(self) -> None:
        """Finish all loads that the engine has requested."""
        for load in self.loads:
            real = self._read(load.blocks)
            until(lambda real=real: real.is_done, "the load")  # type: ignore[misc]
            load.num_loaded, load.is_done = real.num_loaded, True


def test_reading_does_not_rest_once_the_others_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab = lab.restart()
    held = HeldLoads(lab, monkeypatch)
    for request in (make_request(prompt_of(2), max_tokens=3), make_request(prompt_of(1), max_tokens=3)):
        lab.engine.add(request)
        lab.step()
    (load,) = held.loads
    load.pace = PACE
    lab.step()
    assert load.pace == PACE
    for _ in range(5):
        lab.step()
    assert not load.pace
    held.end()
    lab.drain()
    lab.engine.close()


def test_requests_that_compute_nothing_slow_no_reading_down(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab = lab.restart()
    assert lab.engine.stored is not None
    found = []
    for number, is_held in enumerate((True, False)):
        lab.engine.add(make_request(prompt_of(2 + number), max_tokens=9))
        lab.step()
        (held,) = scheduler_of(lab.engine).running.values()
        held.queue.awaits_media = is_held
        lab.engine.add(make_request(prompt_of(1), max_tokens=3))
        lab.step()
        found += [each.load.pace for each in lab.engine.stored.loads]
        held.queue.awaits_media = False
        lab.drain()
        flood(lab)
    assert found == [0, PACE]
    lab.engine.close()


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


@pytest.mark.parametrize("num_states", [0, 8])
def test_beside_others_a_long_prompt_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_states: int
) -> None:
    """No step copies more than a few evicted blocks. A part that cannot be read ends the loading."""
    monkeypatch.setattr(stored_blocks, "MAX_BUSY_BLOCKS", 2)
    lab = StoreLab(tmp_path, num_blocks=64, num_states=num_states)
    lab.run_one(prompt_of(1), max_tokens=1)
    lab.engine.close()
    for is_damaged, found in ((False, 28), (True, 16 if not num_states else 0)):
        lab = StoreLab(tmp_path, num_blocks=64, num_states=num_states)
        loads = Mock(wraps=lab.store.load)
        monkeypatch.setattr(lab.store, "load", loads)
        if is_damaged:
            segment, position = lab.store.store.index[lab.hashes(prompt_of(1))[4]]
            with segment.path.open("r+b") as file:
                file.seek(position + HEADER_BYTES)
                file.write(b"wrong")
        other, long = (
            make_request(prompt_of(2 + is_damaged, 9), max_tokens=30),
            make_request(prompt_of(1), max_tokens=3),
        )
        lab.engine.add(other)
        lab.step()
        lab.engine.add(long)
        replays = lab.drain()
        for request in (other, long):
            check_against_reference(lab, request, replays[request.id])
        assert num_cached(replays[long.id]) == found
        assert max(len(call.args[0]) for call in loads.call_args_list) <= 2 + (num_states > 0)
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


# -- recurrent states ------------------------------------------------------------------------------------------


def test_a_state_that_was_evicted_is_read_with_the_blocks_before_it(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path, num_states=3)
    first = lab.run_one(prompt_of(1), max_tokens=4)
    flood(lab)
    lab.settle()
    again = lab.run_one(prompt_of(1), max_tokens=4)
    assert (again.first.tokens, num_cached(again)) == (first.first.tokens, 28)
    lab.engine.close()


def test_a_state_is_read_alone_if_its_blocks_are_in_memory(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path, num_states=3, num_blocks=200)
    lab.run_one(prompt_of(1), max_tokens=1)
    flood(lab)
    lab.settle()
    assert num_cached(lab.run_one(prompt_of(1), max_tokens=1)) == 28
    statistics = lab.engine.statistics()
    assert statistics.num_restored_tokens == 0
    assert statistics.num_restored_bytes == lab.executor.kv_blocks.state_bytes
    lab.engine.close()


def test_blocks_without_a_state_are_not_read_but_say_where_others_leave_them(tmp_path: Path) -> None:
    """Like in memory, the second prompt that diverges from a chain of blocks stores the state at that point, even
    across a restart."""
    lab, common = StoreLab(tmp_path, num_states=8), prompt_of(1)[:16]
    lab.run_one([*common, *[1] * 9], max_tokens=1)
    lab = lab.restart()
    assert num_cached(lab.run_one([*common, *[2] * 9], max_tokens=1)) == 0
    assert lab.engine.statistics().num_restored_tokens == 0
    lab = lab.restart()
    assert num_cached(lab.run_one([*common, *[3] * 9], max_tokens=1)) == 16
    lab.engine.close()


def test_a_state_that_is_damaged_is_not_continued_from(tmp_path: Path) -> None:
    lab = StoreLab(tmp_path, num_states=8)
    want = lab.run_one(prompt_of(1), max_tokens=4)
    lab.engine.close()
    segment, position = lab.store.store.index[state_key(lab.hashes(prompt_of(1)[:28])[-1])]
    with segment.path.open("r+b") as file:
        file.seek(position + HEADER_BYTES)
        file.write(b"wrong")
    lab = StoreLab(tmp_path, num_states=8)
    got = lab.run_one(prompt_of(1), max_tokens=4)
    assert (got.first.tokens, num_cached(got)) == (want.first.tokens, 0)
    lab.engine.close()


@given(seed=SEED)
def test_a_recurrent_model_finds_the_same_with_and_without_a_restart(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Several conversations and users with common beginnings take turns. One engine runs on, and the other restarts."""
    random, kept = Random(seed), StoreLab(tmp_path_factory.mktemp("kept"), num_states=200, num_blocks=400)
    folder = tmp_path_factory.mktemp("restarted")
    chats = [(prompt_of(i % 2, random.randint(1, 20)), random.choice(["", "t"])) for i in range(4)]
    lab = StoreLab(folder, num_states=200, num_blocks=400)
    for _ in range(8):
        tokens, tenant = random.choice(chats)
        tokens += [random.randrange(50) for _ in range(random.randint(0, 6))]
        want, got = (each.run_one(tokens, max_tokens=7, tenant=tenant, temperature=0.0) for each in (kept, lab))
        assert (got.first.tokens, num_cached(got)) == (want.first.tokens, num_cached(want))
        tokens += got.first.tokens
        if random.random() < 0.5:
            lab.engine.close()
            lab = StoreLab(folder, num_states=200, num_blocks=400)
    for each in (lab, kept):
        each.engine.close()


# -- who finds it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_states", [0, 8])
@pytest.mark.parametrize("other", [{"tenant": "b"}, {"adapter": "x"}, {"tenant": "", "adapter": None}])
def test_no_other_tenant_adapter_or_model_finds_a_block(tmp_path: Path, other: dict[str, Any], num_states: int) -> None:
    lab = StoreLab(tmp_path, num_states=num_states)
    lab.run_one(prompt_of(1), tenant="a", max_tokens=1)
    lab = lab.restart()
    assert num_cached(lab.run_one(prompt_of(1), max_tokens=1, **other)) == 0
    lab.engine.close()
    changed = StoreLab(tmp_path, seed=1, num_states=num_states)
    assert num_cached(changed.run_one(prompt_of(1), tenant="a", max_tokens=1)) == 0
    changed.engine.close()


@pytest.mark.parametrize("num_states", [0, 8])
def test_a_forgotten_user_computes_again_and_others_do_not(tmp_path: Path, num_states: int) -> None:
    lab = StoreLab(tmp_path, num_blocks=64, num_states=num_states)
    for tenant in "ab":
        lab.run_one(prompt_of(1), tenant=tenant, max_tokens=1)
    lab.engine.close()
    assert forget_tenant(tmp_path, "a") == 7 + (num_states > 0)
    lab = StoreLab(tmp_path, num_states=num_states)
    assert [num_cached(lab.run_one(prompt_of(1), tenant=tenant, max_tokens=1)) for tenant in "ab"] == [0, 28]
    lab.engine.close()


class Unstored(ScriptedExecutor):
    """A model in another process, which has no KV store."""

    kv_blocks = property(lambda self: None, lambda self, blocks: None)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("executor", "config", "problem"),
    [
        (Unstored(), {}, "needs a model in the process of its engine"),
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
    assert opened.readers.pace == PACE
    opened.close()


def test_without_a_folder_that_can_be_written_an_optional_store_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "file"))
    assert open_store(ScriptedExecutor(), EngineConfig(kv_store="auto")) is None
    with pytest.raises(InvalidRequest, match="kv_store_key"):
        open_store(ScriptedExecutor(), EngineConfig(kv_store="auto", kv_store_key=str(tmp_path / "none")))
    with pytest.raises(InvalidRequest, match="name a folder that can be written"):
        open_store(ScriptedExecutor(), EngineConfig(kv_store=str(tmp_path / "file")))


def test_a_store_that_is_too_small_for_a_state_is_refused(tmp_path: Path) -> None:
    executor, least = ScriptedExecutor(num_states=4), 16 * (1000 + HEADER_BYTES)
    executor.kv_blocks.state_bytes = 1000
    with pytest.raises(InvalidRequest, match=f"needs at least {least}"):
        open_store(executor, EngineConfig(kv_store=str(tmp_path), kv_store_bytes=least - 1))
    store = open_store(executor, EngineConfig(kv_store=str(tmp_path), kv_store_bytes=least))
    assert store is not None
    store.close()
