"""Tests of many adapters with few per step: each gets its turn, no step exceeds the limit, and no output changes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.engine.scheduling.lora_scheduler import LoRAScheduler
from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import AdapterRefused, BridleError, InvalidRequest, UnknownAdapter
from bridle.outputs import FinishReason
from bridle.testing.text import PieceDecoder
from tests.engine.programs import VOCAB
from tests.engine.random_labs import PIECES, random_request
from tests.engine.support import Lab, check_against_reference, make_request, make_sequence, more

SEED = st.integers(0, 1 << 40)
NAMES = ("a", "b", "c", "d", "e", "f", "g")


class FakeStore:
    """A store of adapters that load in a few steps. It has room for some adapters, and evicts those that had a turn."""

    def __init__(self, random: Random, known: Sequence[str] = NAMES, room: int = 3) -> None:
        self.random = random
        self.known = set(known)
        self.room = room
        self.users: dict[str, int] = {}
        self.on_device: list[str] = []
        self.had_turn: set[str] = set()
        self.failures: dict[str, BridleError] = {}
        self.is_closed = False

    def check_known(self, key: str) -> None:
        if key not in self.known:
            raise UnknownAdapter(f"no {key}", "adapter")

    def open(self, key: str) -> None:
        self.check_known(key)
        self.users[key] = self.users.get(key, 0) + 1

    def leave(self, key: str) -> None:
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        assert len(set(keys)) == len(keys)
        assert set(keys) <= set(self.users)
        missing = [key for key in keys if key not in self.on_device]
        if missing and self.random.random() < 0.5:
            if len(self.on_device) >= self.room:
                leaving = [key for key in self.on_device if key not in keys or key in self.had_turn]
                if leaving:
                    self.on_device.remove(leaving[0])
            if len(self.on_device) < self.room:
                self.on_device.append(missing[0])
                self.had_turn.discard(missing[0])
        available = {key for key in keys if key in self.on_device}
        self.had_turn |= available
        return available

    def take_failures(self) -> dict[str, BridleError]:
        failures, self.failures = self.failures, {}
        return failures

    def counts(self) -> dict[str, int]:
        return {"num_adapters_on_device": len(self.on_device)}

    def close(self) -> None:
        self.is_closed = True


class AdapterLab(Lab):
    """A lab whose engine has an adapter store. Each step plan is checked against the store."""

    def __init__(self, store: FakeStore | None, **options: object) -> None:
        self.store = store
        super().__init__(on_forward=self.check_plan, **options)

    def make_one(self, config: EngineConfig) -> Engine:
        return Engine(
            self.executor, config, pools=self.pools, decoder=self.decoder, adapters=self.store, clock=self.clock
        )

    def check_plan(self, plan: StepPlan) -> None:
        names = [row.adapter for row in plan.rows]
        in_order = list(dict.fromkeys(names))
        assert [name for one in in_order for name in names if name == one] == names, "rows of one lie side by side"
        assert in_order.index(None) == 0 if None in in_order else True, "rows without an adapter come first"
        adapters = set(names) - {None}
        assert len(adapters) <= self.engine.config.max_step_adapters
        if self.store is not None:
            assert adapters <= set(self.store.on_device)


def options_of(random: Random) -> dict[str, object]:
    return {
        "vocab_size": VOCAB,
        "num_blocks": random.choice([9, 14, 30, 90]),
        "block_size": 4,
        "eos_token_ids": (13,),
        "decoder": PieceDecoder(PIECES),
        "max_num_batched_tokens": random.choice([1, 3, 8, 40]),
        "max_num_seqs": random.choice([1, 2, 5, 50]),
        "max_step_adapters": random.choice([1, 2, 3, 64]),
        "max_forks": 100_000,
    }


@more(2)
@given(SEED)
def test_an_output_depends_on_its_request_alone(seed: int) -> None:
    """Each request gives the output that the reference computes for it alone, whatever adapters are loaded, wait or are
    evicted."""
    random = Random(seed)
    store = random.choice([None, FakeStore(random, room=random.choice([1, 2, 4]))])
    lab = AdapterLab(store, **options_of(random))
    requests = [
        random_request(random, id=f"r{number}", adapter=random.choice([None, *NAMES[: random.choice([1, 3, 7])]]))
        for number in range(random.randint(1, 9))
    ]
    accepted = []
    for request in requests:
        try:
            lab.engine.add(request)
            accepted.append(request)
        except InvalidRequest:
            continue
        for _ in range(random.choice([0, 0, 1, 3])):
            lab.step()
    replays = lab.drain()
    for request in accepted:
        check_against_reference(lab, request, replays[request.id])
    if store is not None:
        assert not store.users


@given(SEED, st.integers(1, 5))
def test_no_adapter_starves(seed: int, cap: int) -> None:
    """If more adapters wait than a step can have, each adapter runs again before any other adapter runs twice."""
    random = Random(seed)
    rotation = LoRAScheduler(cap)
    sequences = [make_sequence(number, [1], adapter=name) for number, name in enumerate(NAMES)]
    plain = make_sequence(99, [1])
    for name in NAMES:
        rotation.open(name)
    last = dict.fromkeys(NAMES, 0)
    longest = -(-len(NAMES) // cap)
    for number in range(1, 4 * len(NAMES)):
        random.shuffle(sequences)
        rotation.begin_step(sequences[:3], [*sequences[3:], plain], [*sequences[3:], plain])
        assert plain.is_ready
        served = [seq.request.adapter for seq in sequences if seq.is_ready]
        assert len(served) == min(cap, len(NAMES))
        last.update({name: number for name in served if name is not None})
        assert number - min(last.values()) < longest


def test_those_who_have_no_seat_take_no_turn() -> None:
    rotation = LoRAScheduler(1)
    one, other = make_sequence(1, [1], adapter="a"), make_sequence(2, [1], adapter="b")
    for seq in (one, other):
        rotation.open(seq.request.adapter)
    for _ in range(3):
        rotation.begin_step([one], [], [other])
        assert (one.is_ready, other.is_ready) == (True, False)


def test_held_up_sequences_want_no_adapter() -> None:
    store = FakeStore(Random(0))
    rotation = LoRAScheduler(4, store)
    held, free = make_sequence(1, [1], adapter="a"), make_sequence(2, [1], adapter="b")
    held.control.is_suspended = True
    for seq in (held, free):
        rotation.open(seq.request.adapter)
    for _ in range(20):
        rotation.begin_step([held, free], [], [])
    assert store.on_device == ["b"]


def test_others_go_on_while_an_adapter_comes() -> None:
    store = FakeStore(Random(0), room=0)
    lab = AdapterLab(store)
    lab.engine.add(make_request(adapter="a", id="waits", max_tokens=4))
    lab.engine.add(make_request(id="goes", max_tokens=4))
    while "goes" in lab.engine.request_ids:
        lab.step()
    assert lab.engine.request_ids == ("waits",)
    assert lab.engine.is_stalled
    store.room = 1
    assert lab.drain()["waits"].first.reason is FinishReason.LENGTH


def test_an_adapter_that_cannot_be_had_ends_its_requests_only() -> None:
    store = FakeStore(Random(0), room=0)
    lab = AdapterLab(store)
    requests = [make_request(adapter=name, max_tokens=3) for name in ("a", "b", "a", None)]
    for request in requests:
        lab.engine.add(request)
    lab.step()
    store.failures = {"a": AdapterRefused("damaged", "source")}
    store.room = 1
    replays = lab.drain()
    reasons = [replays[request.id].first.reason for request in requests]
    assert reasons == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    ended = replays[requests[0].id].first.finished
    assert ended is not None and isinstance(ended.error, AdapterRefused)


def test_unknown_adapters_are_refused_at_the_door() -> None:
    lab = AdapterLab(FakeStore(Random(0), known=("a",)))
    with pytest.raises(UnknownAdapter):
        lab.engine.add(make_request(adapter="nobody"))
    assert not lab.engine.has_work
    lab.engine.close()
    assert lab.store is not None and lab.store.is_closed
