"""Tests that a server that restarts in the middle of an agent's session computes no more than one without a restart,
and continues stored responses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from bridle import LLM
from tests.http.restarts import SYSTEM, served, turn
from tests.waiting import until

TURNS = 10
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def session(folder: Path, restarts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the number of prompt tokens and of cached prompt tokens of each turn. The server restarts before the turns
    in `restarts`."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Plan my week."}]
    counts: list[tuple[int, int]] = []
    for begin, end in zip((0, *restarts), (*restarts, TURNS), strict=True):
        with served(folder, "--kv-store", str(folder / "kv")) as url:
            for number in range(begin, end):
                usage = turn(url, messages, tools=[TOOL], tool_choice="none")
                counts.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
                call = {"id": f"call_{number}", "type": "function"}
                call["function"] = {"name": "weather", "arguments": f'{{"day": {number}}}'}  # type: ignore[assignment]
                messages[-1] = {"role": "assistant", "content": "", "tool_calls": [call]}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"Day {number}: rain. " * 5})
    return counts


@pytest.mark.slow  # three servers and twenty turns; `test_warm_restart.py` has the short form
def test_a_restart_in_a_session_computes_no_token_again(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    restarted = session(tmp_path / "two", (5,))
    assert restarted[5:] == session(tmp_path / "one", ())[5:]
    for (before, _), (_, cached) in pairwise(restarted):
        assert cached >= before // 16 * 16 - 16  # the prompt ends with a header that a call replaces


def test_a_stored_response_is_continued_after_a_restart(tmp_path: Path) -> None:
    flags = ("--state-db", str(tmp_path / "state.db"), "--kv-store", str(tmp_path / "kv"))
    body: dict[str, Any] = {"model": "demo", "input": SYSTEM, "max_output_tokens": 8, "temperature": 0}
    with served(tmp_path, *flags) as url:
        first = httpx.post(f"{url}/v1/responses", json=body, timeout=60).raise_for_status().json()
        cache = httpx.post(f"{url}/v1/caches", json={"model": "demo", "prompt": SYSTEM}, timeout=60).json()
    with served(tmp_path, *flags) as url:
        follow = {**body, "input": "And now?", "previous_response_id": first["id"]}
        second = httpx.post(f"{url}/v1/responses", json=follow, timeout=60).raise_for_status().json()
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["input_tokens"] // 16 * 16 - 16 > 0
        path = f"{url}/v1/caches/{cache['id']}/prefetch"
        assert httpx.post(path, timeout=60).json()["usage"]["cached_tokens"] >= cache["tokens"] - 16


def test_two_engines_that_run_share_what_one_has_retained(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_store": str(tmp_path / "kv"), "num_blocks": 256}
    with LLM("demo", **options) as one, LLM("demo", **options) as other:
        held = one.cache(SYSTEM).num_tokens
        assert held > 0
        written = one.model.client
        until(lambda: written.statistics().num_stored_blocks >= held // 16, "blocks on disk")
        other.generate("x", max_tokens=1)
        until(lambda: _found(other) >= held // 16, "blocks of the other engine")
        assert other.generate(SYSTEM + "So", max_tokens=1)[0].usage.cached_tokens == held
        assert other.model.client.statistics().num_restored_tokens == held


def _found(llm: LLM) -> int:
    """Wait for the KV store, which is read again at most once per second."""
    llm.generate("A prompt of at least one block, so that the store is looked at.", max_tokens=1)
    return llm.model.client.statistics().num_blocks_in_store
