"""Tests of the choice of a replica: the router takes the replica that has cached the prompt's beginning, unless that
replica has too much work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bridle.distributed.prefix_router import AWAY, SLACK_TOKENS, PrefixChoice, PrefixRouter, first_from
from bridle.engine import Engine
from tests.distributed.replica_kit import make_executor
from tests.engine.support import make_request

IDLE = [0.0, 0.0, 0.0]


def choose(
    router: PrefixRouter, prompt: Sequence[int], salt: str = "", loads: Sequence[float] = IDLE, key: str = ""
) -> PrefixChoice:
    choice = router.choose(prompt, salt, loads, key)
    assert choice is not None
    return choice


def test_the_replica_with_the_beginning_is_chosen() -> None:
    router = PrefixRouter(3, block_size=4)
    prompt = tuple(range(20))
    home = choose(router, prompt).replica
    assert all(choose(router, (*prompt, i)).replica == home for i in range(10))
    assert {choose(router, prompt, f"tenant {i}").replica for i in range(9)} == {0, 1, 2}


def test_one_key_goes_to_one_replica_unless_another_has_the_prompt_or_it_is_busy() -> None:
    router = PrefixRouter(3, block_size=4)
    home = choose(router, range(20), key="k")
    assert all(choose(router, [i] * 20, key="k") == (home.replica, 0) for i in range(30, 36))
    other = choose(router, [7] * 20, key="other").replica
    assert other != home.replica
    assert choose(router, [7] * 20, key="k") == (other, 16)
    assert choose(router, [8] * 20, key="k", salt="another user").replica != other  # that has the key now
    loads = [1_000_000.0 if each == other else 0.0 for each in range(3)]
    assert choose(router, [9] * 20, key="k", loads=loads).replica != other


def test_a_busy_or_absent_home_is_left() -> None:
    router = PrefixRouter(2, block_size=4)
    prompt = tuple(range(20))
    home = choose(router, prompt, loads=[0, 0]).replica
    loads = [0.0, 0.0]
    loads[home] = 1_000_000
    assert choose(router, prompt, loads=loads).replica == 1 - home
    loads[home] = AWAY
    assert choose(router, prompt, loads=loads).replica == 1 - home
    assert router.choose(prompt, "", [AWAY, AWAY]) is None


def test_a_home_may_be_ahead_by_what_it_saves() -> None:
    """The replica with the cached beginning may have more work than others, up to the work that its cache saves."""
    router = PrefixRouter(2, block_size=100)
    for length in (2_000, 3_000):
        prompt = range(length, 2 * length + 1)
        home, _ = choose(router, prompt, loads=[0, 0])
        loads = [0.0, 0.0]
        loads[home] = length + SLACK_TOKENS
        assert choose(router, prompt, loads=loads) == (home, length)
        loads[home] += 1
        assert choose(router, prompt, loads=loads) == (1 - home, 0)


def test_a_lost_cache_is_forgotten() -> None:
    router, prompt = PrefixRouter(3, block_size=4), tuple(range(20))
    home = choose(router, prompt).replica
    router.forget(home)
    loads = [1.0, 1.0, 1.0]
    loads[(home + 1) % 3] = 0.0  # nothing speaks for the old home any more
    again = choose(router, prompt, loads=loads)
    assert again == ((home + 1) % 3, 0)
    assert choose(router, prompt) == (again.replica, 16)
    router.forget(home)  # lost once more: that concerns nobody
    assert choose(router, prompt) == (again.replica, 16)


def test_what_a_cache_should_have_is_told() -> None:
    router, prompt = PrefixRouter(2, block_size=4), tuple(range(20))
    home, num_cached = choose(router, prompt, loads=[0, 0])
    assert num_cached == 0
    assert choose(router, prompt, loads=[0, 0]) == (home, 16)  # the last token is computed each time
    assert choose(router, (*prompt[:9], 99, 99, 99), loads=[0, 0]) == (home, 8)
    loads = [0.0, 0.0]
    loads[home] = AWAY
    assert choose(router, prompt, loads=loads) == (1 - home, 0)
    assert choose(router, (*prompt, 1), loads=loads) == (1 - home, 20 - 4)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
moves = st.lists(st.tuples(prompts, st.sampled_from(["", "b"]), st.integers(0, 2), st.booleans()), max_size=30)


@given(moves)
def test_no_more_is_counted_on_than_was_sent_there(moves: list[tuple[tuple[int, ...], str, int, bool]]) -> None:
    """Only prompts that went to the same replica since its start, with the same salt, count as cached, and never the
    whole prompt."""
    router = PrefixRouter(3, block_size=2, max_blocks=20)
    sent: list[set[tuple[str, tuple[int, ...]]]] = [set(), set(), set()]
    for prompt, salt, number, is_lost in moves:
        if is_lost:
            router.forget(number)
            sent[number].clear()
        loads = [0.0, 0.0, 0.0]
        loads[number] = 2_000.0
        replica, num_cached = choose(router, prompt, salt, loads)
        assert num_cached < len(prompt)
        assert num_cached % 2 == 0
        assert num_cached == 0 or any(
            theirs == salt and known[:num_cached] == prompt[:num_cached] for theirs, known in sent[replica]
        )
        sent[replica].add((salt, prompt))


def test_memory_is_bounded_and_the_latest_is_kept() -> None:
    router = PrefixRouter(2, block_size=4, max_blocks=40)
    latest = []
    for i in range(200):
        prompt = tuple(range(1_000 * i, 1_000 * i + 20))
        latest.append((prompt, choose(router, prompt, loads=[0, 0]).replica))
        assert len(router) <= 40
    assert all(choose(router, prompt, loads=[0, 0]) == (home, 16) for prompt, home in latest[-5:])


def test_more_replicas_are_remembered_more_of() -> None:
    prompts = [tuple(range(1_000 * i, 1_000 * i + 601)) for i in range(2_000)]  # 150 blocks each
    few, many = PrefixRouter(2, block_size=4), PrefixRouter(200, block_size=4)
    for router in (few, many):
        for prompt in prompts:
            router.choose(prompt, "", [0.0] * router.num_replicas)
    assert len(few) <= 1 << 17
    assert len(many) == 150 * 2_000


def test_equals_take_turns() -> None:
    router = PrefixRouter(4, block_size=4)
    loads = [0.0, 0.0, AWAY, 0.0]
    chosen = Counter(choose(router, (i,) * 9, loads=loads).replica for i in range(30))
    assert chosen == {0: 10, 1: 10, 3: 10}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 20))
def test_the_search_goes_around(loads: list[int], start: int) -> None:
    least = min(loads)
    candidates = [(start + i) % len(loads) for i in range(len(loads))]
    assert first_from(start, loads, least) == next(number for number in candidates if loads[number] == least)


def hit_rate(number_for: Any, num_replicas: int = 4) -> float:
    """Return the share of cached prompt tokens for many users with their own system prompts, which exceed each engine's
    cache."""
    engines = [Engine(make_executor(num_blocks=160)) for _ in range(num_replicas)]
    random = Random(1)
    systems = [tuple(random.randrange(30) for _ in range(64)) for _ in range(24)]
    for number in range(300):
        prompt = (*random.choice(systems), *(random.randrange(30) for _ in range(8)))
        engine = engines[number_for(prompt)]
        engine.add(make_request(prompt, id=f"h{number}", max_tokens=2))
        while engine.has_work:
            engine.step()
    statistics = [engine.statistics() for engine in engines]
    return sum(each.num_cached_tokens for each in statistics) / sum(each.num_prompt_tokens for each in statistics)


def test_affinity_finds_more_than_chance() -> None:
    router, random = PrefixRouter(4, block_size=4), Random(2)
    with_affinity = hit_rate(lambda prompt: choose(router, prompt, loads=[0, 0, 0, 0]).replica)
    by_chance = hit_rate(lambda prompt: random.randrange(4))
    print(f"hit rate with affinity {with_affinity:.3f}, by chance {by_chance:.3f}")
    assert with_affinity > 1.3 * by_chance
