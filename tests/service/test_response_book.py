"""Stored responses: found by their user alone, bounded in number and bytes, forgotten in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import UnknownResponse
from bridle.service.response_book import ResponseBook
from bridle.testing.clock import FakeClock


def test_nobody_finds_those_of_others_and_nothing_lasts() -> None:
    clock = FakeClock()
    book = ResponseBook(clock=clock, max_age=10.0)
    assert book.keep("alice", {"id": "r", "output": [1]}, ["said"])
    assert book.keep("bob", {"id": "r", "output": [2]}, [])  # even under the same id
    assert (book.response("alice", "r"), book.said("alice", "r")) == ({"id": "r", "output": [1]}, ["said"])
    with pytest.raises(UnknownResponse, match="'s'"):
        book.response("alice", "s")
    book.delete("bob", "r")
    with pytest.raises(UnknownResponse):
        book.delete("bob", "r")
    clock.advance(10.0)
    with pytest.raises(UnknownResponse):
        book.said("alice", "r")
    assert (len(book), book.num_bytes) == (0, 0)


def test_what_is_kept_does_not_change_with_what_was_given() -> None:
    book, response = ResponseBook(), {"id": "r", "output": [{"text": "a"}]}
    book.keep("u", response, [])
    response["output"].clear()  # type: ignore[attr-defined]
    book.response("u", "r")["output"].clear()
    assert book.response("u", "r")["output"] == [{"text": "a"}]


@given(st.lists(st.tuples(st.sampled_from("uvw"), st.integers(0, 9), st.integers(0, 3_000)), max_size=40))
def test_it_is_bounded_and_the_newest_stays(kept: list[tuple[str, int, int]]) -> None:
    book = ResponseBook(6, 3, 9_000, 5_000, clock=FakeClock())
    for user, number, size in kept:
        if book.keep(user, {"id": str(number)}, ["a" * size]):
            assert book.said(user, str(number)) == ["a" * size]
        shares = book._shares
        assert len(book) == sum(len(share.ids) for share in shares.values()) <= 6
        assert book.num_bytes == sum(entry.num_bytes for entry in book._entries.values()) <= 9_000
        assert all(0 < len(share.ids) <= 3 and share.num_bytes <= 5_000 for share in shares.values())
    assert not book.keep("u", {"id": "large"}, ["a" * 5_000])
