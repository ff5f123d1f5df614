"""What is remembered of answers with calls: found by its user alone, bounded, and forgotten in time."""

from __future__ import annotations

from bridle.outputs import ChatMessage, ToolCall
from bridle.serving.outputs.tool_call_token_cache import ToolCallTokenCache
from bridle.testing.clock import FakeClock


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
