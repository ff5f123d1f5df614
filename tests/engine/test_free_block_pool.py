"""Tests of the free block pool: no block is lost or allocated twice, and cached blocks are evicted last, oldest
first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.kv.free_block_pool import FreeBlocks
from bridle.errors import InternalError


def test_fresh_owner_gets_a_run() -> None:
    free = FreeBlocks(8)
    taken = [free.allocate(1, None, 3)[0]]
    other = free.allocate(2, None, 3)[0]
    taken += [free.allocate(1, taken[-1], 2)[0], free.allocate(1, taken[-1] + 1, 1)[0]]
    assert taken == [taken[0], taken[0] + 1, taken[0] + 2]
    assert other not in taken


def test_reserved_blocks_are_given_to_others_when_nothing_else_is_free() -> None:
    free = FreeBlocks(4)
    first, _ = free.allocate(1, None, 4)
    others = {free.allocate(2, None, 1)[0] for _ in range(3)}
    assert others | {first} == {0, 1, 2, 3}
    assert len(free) == 0


def test_released_reservation_is_open_again() -> None:
    free = FreeBlocks(4)
    first, _ = free.allocate(1, None, 4)
    free.release_reservation(1)
    run = [free.allocate(2, None, 3)[0]]
    run += [free.allocate(2, run[-1], 1)[0] for _ in range(1)]
    assert run == [first + 1, first + 2]


def test_cached_blocks_go_last_and_oldest_first() -> None:
    free = FreeBlocks(4)
    blocks = [free.allocate(1, None, 1)[0] for _ in range(3)]
    for block in (blocks[2], blocks[0], blocks[1]):
        free.free_cached(block)
    plain, evicted = free.allocate(2, None, 1)
    assert (plain, evicted) == (3, [])
    order = [free.allocate(2, None, 1) for _ in range(3)]
    assert order == [(blocks[2], [blocks[2]]), (blocks[0], [blocks[0]]), (blocks[1], [blocks[1]])]


def test_revived_block_is_not_evicted() -> None:
    free = FreeBlocks(2)
    a, b = (free.allocate(1, None, 1)[0] for _ in range(2))
    free.free_cached(a)
    free.free_cached(b)
    free.revive(a)
    assert free.allocate(2, None, 1) == (b, [b])
    assert len(free) == 0


def test_taking_from_nothing_is_our_bug() -> None:
    free = FreeBlocks(1)
    free.allocate(1, None, 1)
    with pytest.raises(InternalError, match="no KV block is free"):
        free.allocate(1, None, 1)


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("tpcrfx"), st.integers(0, 30)), max_size=60))
def test_blocks_are_neither_lost_nor_given_twice(num_blocks: int, script: list[tuple[str, int]]) -> None:
    free = FreeBlocks(num_blocks)
    taken: list[int] = []
    cached: list[int] = []  # oldest first
    for verb, number in script:
        if verb == "t" and len(free):
            after = taken[number % len(taken)] if taken and number % 2 else None
            block, evicted = free.allocate(number % 3, after, 1 + number % 5)
            assert block not in taken
            assert sorted(evicted) == sorted(block for block in cached if block in evicted)
            assert not evicted or evicted[-1] == cached[0] or cached[0] in evicted
            cached = [old for old in cached if old not in evicted]
            taken.append(block)
        elif verb in "pc" and taken:
            block = taken.pop(number % len(taken))
            free.free_plain(block) if verb == "p" else free.free_cached(block)
            cached += [block] if verb == "c" else []
        elif verb in "rf" and cached:
            block = cached.pop(number % len(cached))
            free.revive(block) if verb == "r" else free.forget(block)
            taken += [block] if verb == "r" else []
        elif verb == "x":
            free.release_reservation(number % 3)
        assert free.free_ids() == set(range(num_blocks)) - set(taken)
        assert len(free) == num_blocks - len(taken)
        assert free.num_cached == len(cached)
