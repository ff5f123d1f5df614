"""Tests of users' stored data: only its user finds it, its number and bytes are limited, and it expires."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import UnknownResponse
from bridle.outputs import ChatMessage, ToolCall
from bridle.serving.outputs.response_store import BOUNDS as RESPONSES
from bridle.serving.outputs.response_store import ResponseStore
from bridle.serving.outputs.tool_call_token_cache import ToolCallTokenCache
from bridle.serving.tenancy.per_user_store import OVERHEAD, PerUserStore, StoreBounds
from bridle.testing.clock import FakeClock
from tests.serving.fakes import check_counts

BOUNDS = StoreBounds(10.0, 6, 4, 9_000, 5_000)
KEPT = st.tuples(st.sampled_from("uvw"), st.sampled_from("0123456789"), st.integers(0, 4_000))


def test_nobody_finds_what_others_keep_and_nothing_lasts() -> None:
    clock = FakeClock()
    book: PerUserStore[str] = PerUserStore(BOUNDS, clock)
    assert book.keep("ann", "r", "a", 1) and book.keep("bob", "r", "b", 1)
    assert (book.find("ann", "r"), book.find("bob", "r"), book.find("eve", "r")) == ("a", "b", None)
    book.drop("bob", "r")
    book.drop("bob", "r")
    assert (book.find("ann", "r"), book.find("bob", "r")) == ("a", None)
    clock.advance(10.0)
    assert book.find("ann", "r") is None and (len(book), book.num_bytes) == (0, 0)
    assert not PerUserStore[str](StoreBounds(0.0, 9, 9, 9_000, 9_000)).keep("ann", "r", "a", 1)


@given(st.lists(KEPT, max_size=40))
def test_it_is_bounded_and_the_newest_stays_if_it_is_small(kept: list[tuple[str, str, int]]) -> None:
    book: PerUserStore[object] = PerUserStore(BOUNDS, FakeClock())
    for user, name, size in kept:
        value = object()
        is_kept = book.keep(user, name, value, size)  # not if its user has most with it alone
        assert is_kept == (book.find(user, name) is value)
        assert is_kept or size > 2_000
        check_counts(book)
    assert not book.keep("u", "large", object(), 5_000)


@given(st.lists(st.tuples(KEPT, st.integers(0, 6_000)), max_size=30))
def test_what_something_really_takes_is_counted_in_time(kept: list[tuple[tuple[str, str, int], int]]) -> None:
    book: PerUserStore[object] = PerUserStore(BOUNDS, FakeClock())
    values = []
    for (user, name, size), real in kept:
        values.append((user, name, object(), real))
        book.keep(user, name, values[-1][2], size)
        book.resize(*values[len(values) // 2])
        check_counts(book)


@given(st.lists(st.tuples(st.sampled_from(["few large", "many small"]), st.booleans()), max_size=60))
def test_who_has_less_than_a_fair_share_loses_nothing(kept: list[tuple[str, bool]]) -> None:
    """A user's data within half of the limits is not evicted for another user."""
    book: PerUserStore[int] = PerUserStore(StoreBounds(10.0, 20, 20, 20_000, 20_000), FakeClock())
    book.keep("quiet", "a", 1, 4_000)
    book.keep("quiet", "b", 2, 500)
    for number, (user, is_more) in enumerate(kept):
        size = (6_000 if user == "few large" else 10) * (1 + is_more)
        book.keep("loud", str(number), number, size)
        check_counts(book)
    assert (book.find("quiet", "a"), book.find("quiet", "b")) == (1, 2)


def test_one_with_a_name_again_takes_the_place_of_the_first() -> None:
    book: PerUserStore[str] = PerUserStore(BOUNDS, FakeClock())
    book.keep("u", "a", "first", 100)
    book.keep("u", "a", "second", 200)
    assert (book.find("u", "a"), len(book), book.num_bytes) == ("second", 1, 200 + OVERHEAD)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2 * BOUNDS.max_bytes)), max_size=30))
def test_what_had_no_room_is_counted(kept: list[tuple[str, int]]) -> None:
    book: PerUserStore[int] = PerUserStore(BOUNDS, FakeClock())
    for number, (user, size) in enumerate(kept):
        book.keep(user, str(number), number, size)
    assert book.num_dropped == len(kept) - len(book)


def test_nobody_finds_those_of_others_and_nothing_lasts() -> None:
    clock = FakeClock()
    book = ResponseStore(replace(RESPONSES, seconds=10.0), clock)
    assert book.keep("alice", {"id": "r", "output": [1]}, ["said"])
    assert book.keep("bob", {"id": "r", "output": [2]}, [])  # even under the same id
    assert (book.response("alice", "r"), book.input_items("alice", "r")) == ({"id": "r", "output": [1]}, ["said"])
    with pytest.raises(UnknownResponse, match="'s'"):
        book.response("alice", "s")
    book.delete("bob", "r")
    with pytest.raises(UnknownResponse):
        book.delete("bob", "r")
    clock.advance(10.0)
    with pytest.raises(UnknownResponse):
        book.input_items("alice", "r")
    assert len(book) == 0


def test_what_is_kept_does_not_change_with_what_was_given() -> None:
    book, response = ResponseStore(), {"id": "r", "output": [{"text": "a"}]}
    book.keep("u", response, [])
    response["output"].clear()  # type: ignore[attr-defined]
    book.response("u", "r")["output"].clear()
    assert book.response("u", "r")["output"] == [{"text": "a"}]


def test_one_that_is_larger_than_a_users_share_is_not_kept() -> None:
    book = ResponseStore(replace(RESPONSES, max_bytes_of_user=5_000))
    assert book.keep("u", {"id": "r"}, []) and not book.keep("u", {"id": "large"}, ["a" * 5_000])
    assert book.input_items("u", "r") == []


def keep(book: ToolCallTokenCache, user: str, call_id: str, num_tokens: int = 3) -> None:
    message = ChatMessage(calls=[ToolCall("f", call_id, "{}")])
    book.keep(user, f"request-{call_id}", "prompt", range(num_tokens), [7, 8], "text", message)


def test_only_its_user_finds_an_answer_and_only_for_a_while() -> None:
    clock = FakeClock()
    book = ToolCallTokenCache(10.0, clock=clock)
    keep(book, "alice", "a")
    found = book.find("alice", "a")
    assert found is not None and (list(found.prompt), list(found.tokens)) == ([0, 1, 2], [7, 8])
    assert book.find("bob", "a") is book.find("alice", "b") is book.find("alice", 5) is None
    clock.advance(10.0)
    assert book.find("alice", "a") is None
    assert len(book) == 0


def test_answers_without_calls_and_without_time_are_not_kept() -> None:
    book, off = ToolCallTokenCache(10.0), ToolCallTokenCache(0.0)
    book.keep("u", "r", "prompt", [1], [2], "text", ChatMessage(content="text"))
    keep(off, "u", "a")
    assert len(book) == len(off) == 0
