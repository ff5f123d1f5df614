"""Stored responses: found by their user alone, bounded in number and bytes, forgotten in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridle.errors import UnknownResponse
from bridle.serving.outputs.response_store import BOUNDS, ResponseStore
from bridle.testing.clock import FakeClock


def test_nobody_finds_those_of_others_and_nothing_lasts() -> None:
    clock = FakeClock()
    book = ResponseStore(replace(BOUNDS, seconds=10.0), clock)
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
    book = ResponseStore(replace(BOUNDS, max_bytes_of_user=5_000))
    assert book.keep("u", {"id": "r"}, []) and not book.keep("u", {"id": "large"}, ["a" * 5_000])
    assert book.input_items("u", "r") == []
