"""`system` blocks that differ in every session are removed from prompts, so that sessions share cached prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from bridle.chat.system_blocks import kept_blocks
from bridle.cli.limit_options import LimitOptions
from bridle.errors import InvalidRequest
from bridle.http import HttpSettings, ServeSettings
from tests.http.harness import scripted_model, served
from tests.waiting import until

LONG = "You are a careful assistant that reads files before it answers. " * 8
BILLING = "x-anthropic-billing-header: cc_version=2.1.328.{}; cc_entrypoint=cli; cch={};"


def blocks(first: str, *more: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in (first, LONG, *more)]


def ask(client: httpx.Client, system: Any) -> dict[str, Any]:
    body = {"system": system, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"])


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with served(scripted_model(max_model_len=2048)) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.fixture
def keeping_client() -> Iterator[httpx.Client]:
    model, settings = scripted_model(max_model_len=2048), HttpSettings(drop_system_blocks=())
    with served(model, settings) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


def num_prompt(usage: dict[str, Any]) -> int:
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def test_requests_that_differ_in_such_a_block_share_what_is_cached(client: httpx.Client) -> None:
    first = ask(client, blocks(BILLING.format("a1b", "00000")))
    second = ask(client, blocks(BILLING.format("fff", "3c4d5")))
    assert first["cache_read_input_tokens"] == 0
    assert num_prompt(first) == num_prompt(second) == num_prompt(ask(client, [{"type": "text", "text": LONG}]))
    assert second["input_tokens"] <= 16  # all but the last block of the cache


def test_they_can_be_kept(keeping_client: httpx.Client) -> None:
    first = ask(keeping_client, blocks(BILLING.format("a1b", "00000")))
    second = ask(keeping_client, blocks(BILLING.format("fff", "3c4d5")))
    assert num_prompt(first) > num_prompt(ask(keeping_client, [{"type": "text", "text": LONG}]))
    assert second["cache_read_input_tokens"] < num_prompt(second) / 2


def test_counts_leave_them_out_as_well(client: httpx.Client) -> None:
    counts = []
    for system in (blocks(BILLING.format("a1b", "00000")), [{"type": "text", "text": LONG}]):
        body = {"system": system, "messages": [{"role": "user", "content": "Hi"}]}
        counts.append(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])
    assert counts[0] == counts[1]


def test_the_log_line_has_their_number(client: httpx.Client) -> None:
    with capture_logs() as lines:  # a line is written after its answer
        ask(client, blocks(BILLING.format("a1b", "00000")))
        ask(client, "x-anthropic-billing-header: all that there is")
        until(lambda: len(lines) == 2, "two lines")
    assert [line.get("dropped_blocks") for line in lines] == [1, None]


def test_only_whole_text_blocks_that_begin_so_are_left_out() -> None:
    kept = blocks("You are x-anthropic-billing-header: no", "y")
    assert kept_blocks(kept, ("x-anthropic-billing-header:",)) == (kept, 0)
    odd: list[dict[str, Any]] = [{"type": "text"}, {"type": "text", "text": 5}]
    assert kept_blocks(odd, ("x",)) == (odd, 0)
    assert kept_blocks(blocks("a", "b"), ("a", LONG[:9])) == ([{"type": "text", "text": "b"}], 2)
    assert kept_blocks([{"type": "text", "text": "a"}], ("a",)) == (None, 1)
    assert kept_blocks(None, ("a",)) == (None, 0)


def test_the_flag_says_which() -> None:
    def dropped(**given: Any) -> tuple[str, ...]:
        return LimitOptions(**given).add_to(ServeSettings()).http.drop_system_blocks

    assert dropped() == ("x-anthropic-billing-header:",)
    assert dropped(drop_system_block=("a", "b")) == ("a", "b")
    assert dropped(drop_system_block=("none",)) == ()
    with pytest.raises(InvalidRequest, match="drop_system_blocks has ''"):
        dropped(drop_system_block=("",))


def test_the_page_has_the_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    assert "--drop-system-block" in page and "x-anthropic-billing-header:" in page
