"""Tests of the default size of the KV cache for machines with little or much memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.model.kv_budget import CACHED_CONTEXTS, MOST_CONTEXTS, SHARE, KVBudget, choose_room

MIB, GIB = 1 << 20, 1 << 30
SIZES = st.integers(0, 1 << 40)


def room(free: int, kind: str = "cpu", **settings: Any) -> KVBudget:
    """Return the KV budget of a model of 0.5 GiB that takes 45 KiB per token, for up to 8,192 tokens."""
    usual = {"context_bytes": 8192 * 45 << 10, "weight_bytes": GIB // 2, "max_seqs": 256}
    return choose_room(free, kind, **usual | settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "wanted", "reason"),
    [
        (GIB // 2, GIB // 4, "50% of what is free"),  # a board of 1 GiB
        (2 * GIB, GIB // 2, "as much as the weights"),
        (18 * GIB, 18 * GIB // 16, "a sixteenth of what is free"),  # it used to be 9 GiB
        (800 * GIB, 64 * 8192 * 45 << 10, "all that 64 requests of the longest length take"),
    ],
)
def test_a_small_model_leaves_a_small_machine_to_others(free: int, wanted: int, reason: str) -> None:
    assert room(free) == (wanted, reason)


def test_a_toy_takes_what_its_requests_can_use() -> None:
    """For the demo model, which takes 12 MiB for its longest request, the budget is what all requests can use."""
    toy = {"context_bytes": 12 * MIB, "weight_bytes": 20 * MIB}
    assert room(18 * GIB, **toy) == (768 * MIB, "all that 64 requests of the longest length take")
    assert room(18 * GIB, **toy, max_seqs=16).num_bytes == 16 * 12 * MIB
    assert room(18 * GIB, **toy, max_seqs=1).num_bytes == CACHED_CONTEXTS * 12 * MIB
    assert room(2 * GIB, **toy).num_bytes == 128 * MIB


def test_a_long_context_gets_room_for_one_request_if_half_of_the_memory_is_enough() -> None:
    assert room(18 * GIB, context_bytes=4 * GIB) == (4 * GIB, "what one request of the longest length takes")
    assert room(6 * GIB, context_bytes=4 * GIB).num_bytes == 3 * GIB


def test_a_gpu_belongs_to_its_server() -> None:
    assert room(80 * GIB, "cuda").num_bytes == 64 * 8192 * 45 << 10
    assert room(20 * GIB, "cuda") == (int(20 * GIB * 0.95), "95% of what is free")


def test_processes_of_one_machine_divide_it() -> None:
    assert room(32 * GIB, num_sharers=2) == (GIB, "a sixteenth of what is free, divided by 2")
    assert room(2 * GIB, num_sharers=4) == (GIB // 4, "50% of what is free, divided by 4")
    assert room(18 * GIB, most=MIB) == (MIB, "its part of the memory for all models")


@given(
    free=SIZES,
    more=SIZES,
    kind=st.sampled_from(["cpu", "cuda"]),
    context=SIZES,
    weights=SIZES,
    seqs=st.integers(1, 1000),
    sharers=st.integers(1, 8),
    most=st.none() | SIZES,
)
def test_a_room_is_never_more_than_there_is_or_than_can_be_used(
    free: int, more: int, kind: str, context: int, weights: int, seqs: int, sharers: int, most: int | None
) -> None:
    def of(free: int) -> int:
        found = choose_room(
            free,
            kind,
            context_bytes=context,
            weight_bytes=weights,
            max_seqs=seqs,
            num_sharers=sharers,
            most=most,
        )
        assert found.reason
        return found.num_bytes

    found = of(free)
    assert 0 <= found * sharers <= free * SHARE[kind] + sharers
    assert found <= min(MOST_CONTEXTS, max(seqs, CACHED_CONTEXTS)) * context
    assert most is None or found <= most
    assert of(free + more) >= found
