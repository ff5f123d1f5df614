"""The choice among replicas: the one that has the prompt's beginning, unless that has too much to do."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bridle.cluster.prefix_router import AWAY, PrefixRouter, first_from
from bridle.engine import Engine
from tests.cluster.replica_kit import make_executor
from tests.engine.support import make_request

IDLE = [0.0, 0.0, 0.0]


def test_the_replica_with_the_beginning_is_chosen() -> None:
    router = PrefixRouter(3, block_size=4)
    prompt = tuple(range(20))
    home = router.choose(prompt, "", IDLE)
    assert all(router.choose((*prompt, i), "", IDLE) == home for i in range(10))
    assert {router.choose(prompt, f"tenant {i}", IDLE) for i in range(9)} == {0, 1, 2}


def test_a_busy_or_absent_home_is_left() -> None:
    router = PrefixRouter(2, block_size=4)
    prompt = tuple(range(20))
    home = router.choose(prompt, "", [0, 0])
    assert home is not None
    loads = [0.0, 0.0]
    loads[home] = 1_000_000
    assert router.choose(prompt, "", loads) == 1 - home
    loads[home] = AWAY
    assert router.choose(prompt, "", loads) == 1 - home
    assert router.choose(prompt, "", [AWAY, AWAY]) is None


def test_a_lost_cache_is_forgotten() -> None:
    router, prompt = PrefixRouter(3, block_size=4), tuple(range(20))
    home = router.choose(prompt, "", IDLE)
    assert home is not None
    router.forget(home)
    loads = [1.0, 1.0, 1.0]
    loads[(home + 1) % 3] = 0.0  # nothing speaks for the old home any more
    again = router.choose(prompt, "", loads)
    assert again == (home + 1) % 3
    assert router.choose(prompt, "", IDLE) == again
    router.forget(home)  # lost once more: that concerns nobody
    assert router.choose(prompt, "", IDLE) == again


def test_memory_is_bounded_and_the_latest_is_kept() -> None:
    router = PrefixRouter(2, block_size=4, max_blocks=40)
    latest = []
    for i in range(200):
        prompt = tuple(range(1_000 * i, 1_000 * i + 20))
        latest.append((prompt, router.choose(prompt, "", [0, 0])))
        assert len(router) <= 40
    assert all(router.choose(prompt, "", [0, 0]) == home for prompt, home in latest[-5:])


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
    chosen = Counter(router.choose((i,) * 9, "", loads) for i in range(30))
    assert chosen == {0: 10, 1: 10, 3: 10}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 20))
def test_the_search_goes_around(loads: list[int], start: int) -> None:
    least = min(loads)
    candidates = [(start + i) % len(loads) for i in range(len(loads))]
    assert first_from(start, loads, least) == next(number for number in candidates if loads[number] == least)


def hit_rate(choose: Any, num_replicas: int = 4) -> float:
    """Share of prompt tokens found in a cache: many users with a system prompt each, on engines that cannot hold the
    prompts of all of them."""
    engines = [Engine(make_executor(num_blocks=160)) for _ in range(num_replicas)]
    random = Random(1)
    systems = [tuple(random.randrange(30) for _ in range(64)) for _ in range(24)]
    for number in range(300):
        prompt = (*random.choice(systems), *(random.randrange(30) for _ in range(8)))
        engine = engines[choose(prompt)]
        engine.add(make_request(prompt, id=f"h{number}", max_tokens=2))
        while engine.has_work:
            engine.step()
    statistics = [engine.statistics() for engine in engines]
    return sum(each.num_cached_tokens for each in statistics) / sum(each.num_prompt_tokens for each in statistics)


def test_affinity_finds_more_than_chance() -> None:
    router, random = PrefixRouter(4, block_size=4), Random(2)
    with_affinity = hit_rate(lambda prompt: router.choose(prompt, "", [0, 0, 0, 0]))
    by_chance = hit_rate(lambda prompt: random.randrange(4))
    print(f"hit rate with affinity {with_affinity:.3f}, by chance {by_chance:.3f}")
    assert with_affinity > 1.3 * by_chance
