"""The counted cache keeps the rules of the real one."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dev.simulation.quick_cache import Chain, Hold, QuickCache


def test_what_one_has_computed_the_next_one_finds() -> None:
    cache = QuickCache(100)
    one = cache.take((("system", 10), ("a", 5)), 17)
    assert cache.num_found((("system", 10),)) == 0
    cache.fill(one, (("system", 10), ("a", 6)))
    assert (cache.num_held, one.num_own) == (17, 1)
    other = cache.take((("system", 10), ("b", 3)), 15)
    assert (other.num_found, cache.num_held) == (10, 22)
    cache.release(one)
    assert (cache.num_held, cache.num_kept) == (15, 6)
    assert cache.num_found((("system", 10), ("a", 8))) == 16


def test_the_oldest_goes_first_and_from_its_end() -> None:
    cache = QuickCache(20)
    for name in "ab":
        hold = cache.take(((name, 10),), 10)
        cache.fill(hold, ((name, 10),))
        cache.release(hold)
    hold = cache.take((("c", 3),), 3)
    assert [cache.num_found(((name, 10),)) for name in "ab"] == [7, 10]
    assert not cache.has_room((("d", 18),), 18)
    assert cache.has_room((("b", 10),), 17)
    assert not cache.has_room((("b", 10),), 18)


@given(st.integers(0, 10_000))
def test_blocks_are_neither_made_nor_lost(seed: int) -> None:
    random, cache, holds = Random(seed), QuickCache(60), list[tuple[Hold, Chain]]()
    for _ in range(80):
        if holds and random.random() < 0.45:
            hold, chain = holds.pop(random.randrange(len(holds)))
            if random.random() < 0.8:
                cache.fill(hold, chain)
            cache.release(hold)
        else:
            chain = ((f"system {random.randrange(3)}", 6), (f"chat {random.randrange(9)}", random.randrange(8)))
            num_blocks = sum(length for _, length in chain) + random.randrange(4)
            if cache.has_room(chain, num_blocks):
                holds.append((cache.take(chain, num_blocks), chain))
        used = {key for hold, _ in holds for key, _ in hold.chain}
        parts = cache._parts
        own = sum(hold.num_own for hold, _ in holds)
        assert cache.num_held == own + sum(parts[key].num_blocks for key in used)
        assert cache.num_kept == sum(part.num_blocks for key, part in parts.items() if key not in used)
        assert cache.num_held + cache.num_kept <= cache.num_blocks
        assert min([hold.num_own for hold, _ in holds], default=0) >= 0
