"""Tests that a restarted server continues conversations from KV on disk, even after `kill -9`."""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bridle.kv_store.store import list_segments
from tests.conftest import IS_FULL
from tests.http.restarts import SYSTEM, served, started, turn
from tests.waiting import PATIENCE, until


def counted(url: str, name: str) -> float:
    found = re.search(rf"^{name}{{.*}} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_a_conversation_continues_over_restarts_and_computes_only_new_tokens(tmp_path: Path) -> None:
    messages, length = [{"role": "system", "content": SYSTEM}], 0
    for number in range(3 if IS_FULL else 2):
        with served(tmp_path) as url:
            messages.append({"role": "user", "content": f"And on day {number}?"})
            usage = turn(url, messages)
            cached = usage["prompt_tokens_details"]["cached_tokens"] if number else 0
            assert cached >= length // 16 * 16
            assert counted(url, "bridle_engine_restored_tokens_total") == cached
            anthropic = {"model": "demo", "system": SYSTEM, "max_tokens": 1, "messages": messages[1:2]}
            read = httpx.post(f"{url}/v1/messages", json=anthropic).raise_for_status().json()["usage"]
            assert read["cache_read_input_tokens"] > 0
            length = usage["prompt_tokens"]


def test_a_server_that_rested_is_warm_after_kill_9(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": SYSTEM}]
    with served(tmp_path, end=signal.SIGKILL) as url:
        length = turn(url, messages)["prompt_tokens"] // 16
        until(lambda: counted(url, "bridle_engine_blocks_in_store") >= length, "blocks on disk")
    with served(tmp_path) as url:
        usage = turn(url, [*messages, {"role": "user", "content": "And now?"}])
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 16 * length


def test_nothing_is_stored_for_several_users_unless_it_is_asked_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("")
    with served(tmp_path, "--keys", str(keys)):
        pass
    assert not (tmp_path / "cache" / "kv").exists()


@pytest.mark.slow  # engines are killed at any moment in `tests/engine/test_store_faults.py`
@pytest.mark.parametrize("rounds", [1, 20])
def test_answers_after_kill_9_are_the_same(tmp_path: Path, rounds: int) -> None:
    """The server has a small KV cache, so that it writes blocks to disk all the time."""
    flags = ("--max-batch-total-tokens", "256", "--kv-store", str(tmp_path / "kv"), "--kv-store-bytes", "64MiB")
    wanted: list[str] = []
    for number in range(rounds + 1):
        said = []
        with served(tmp_path, *flags, end=signal.SIGKILL) as url:
            for question in range(5 + number % 3):
                messages = [{"role": "user", "content": f"{question % 5}: {SYSTEM}"}]
                turn(url, messages)
                said.append(messages[-1]["content"])
            if number:
                assert counted(url, "bridle_engine_blocks_in_store") > 0
        wanted = wanted or said[:5]
        assert said[:5] == wanted
    assert list(list_segments(tmp_path / "kv"))


@pytest.mark.slow  # two engines share what is stored in `test_agent_restart.py`
def test_a_replica_finds_what_another_one_has_computed(tmp_path: Path) -> None:
    flags = ("--replicas", "2", "--kv-memory", "64MiB", "--num-threads", "1", "--kv-store", str(tmp_path / "kv"))
    with started(tmp_path, *flags) as (url, server):

        def post(path: str, **body: Any) -> Any:
            return (
                httpx.post(f"{url}{path}", json={"model": "demo", **body}, timeout=PATIENCE).raise_for_status().json()
            )

        prompts = [f"{number}: {SYSTEM}" for number in range(12)]
        held = [post("/v1/caches", prompt=prompt)["tokens"] // 16 for prompt in prompts]
        until(lambda: counted(url, "bridle_engine_stored_blocks_total") >= sum(held), "blocks on disk")
        first = [each for each in psutil.Process(server).children() if "replica-1.sock" in str(each.cmdline())]
        first[0].kill()  # the one to which the first request went

        def restores() -> bool:
            """Let the other server compute a step, because a server looks for new blocks on disk only from time to
            time."""
            for _ in range(20):
                post("/v1/completions", prompt=f"{next(numbers)}{SYSTEM[::-1]}", max_tokens=1)
            post("/v1/completions", prompt=f"{next(left)}So?", max_tokens=1)
            return counted(url, "bridle_engine_restored_tokens_total") >= 16 * min(held)

        numbers, left = itertools.count(), iter(prompts)
        until(restores, "tokens that another replica has computed")
