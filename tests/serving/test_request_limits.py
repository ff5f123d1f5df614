"""Priorities and deadlines have the same meaning and limits on every API. Only users with the right to do so may raise
their priority."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import DeadlineExceeded, InvalidRequest
from bridle.llm import LLM
from bridle.outputs import FinishReason
from bridle.sampling import SamplingParams
from bridle.serving import build_request
from bridle.serving.requests.request_limits import MAX_DEADLINE, RequestLimits, make_terms
from bridle.serving.tenancy.keys import Identity, KeyStore
from bridle.serving.tenancy.rate_limit import MAX_PRIORITY, UserLimits
from tests.http.harness import scripted_model
from tests.serving.fakes import fake_model

ANN, ROOT = Identity("ann", False), Identity("root", True)


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 10**400, -(10**400), 1.5, True, "1"])
def test_priorities_are_bounded(priority: Any) -> None:
    with pytest.raises(InvalidRequest, match="priority is") as refused:
        RequestLimits(priority)
    assert refused.value.param == "priority" and len(str(refused.value)) < 200


@pytest.mark.parametrize("deadline", [0, -1, MAX_DEADLINE + 1, float("nan"), float("inf"), 10**400, True, "1"])
def test_deadlines_are_bounded(deadline: Any) -> None:
    with pytest.raises(InvalidRequest, match="deadline is") as refused:
        RequestLimits(0, deadline)
    assert refused.value.param == "deadline" and len(str(refused.value)) < 200


@given(st.integers(-MAX_PRIORITY, MAX_PRIORITY), st.integers(-MAX_PRIORITY, MAX_PRIORITY))
def test_pushing_forward_is_a_right(priority: int, most_urgent: int) -> None:
    user = Identity("ann", False, UserLimits(most_urgent=most_urgent))
    assert make_terms(priority, None, ROOT).priority == priority
    if priority >= most_urgent:
        assert make_terms(priority, None, user).priority == priority
    else:
        with pytest.raises(InvalidRequest, match="--most-urgent"):
            make_terms(priority, None, user)


def test_without_a_priority_it_is_the_first_that_is_allowed() -> None:
    assert make_terms(None, None, ANN).priority == 0
    assert make_terms(None, 5, Identity("batch", False, UserLimits(most_urgent=7))).priority == 7
    assert make_terms(None, None, Identity("root", True, UserLimits(most_urgent=7))).priority == 0


def test_the_earlier_end_counts() -> None:
    """A client's deadline begins when its request arrives, and the server's limit begins when the request is built."""
    model, since = fake_model(), time.monotonic() - 100
    for deadline, timeout, end in ((150, None, 50), (150, 20, 20), (None, 20, 20), (150, 80, 50)):
        before = time.monotonic()
        request = build_request(model, "a", SamplingParams(), timeout=timeout, terms=RequestLimits(0, deadline, since))
        assert request.deadline is not None
        begun, built = (since + 100, since + 100) if end == 50 else (before, time.monotonic())
        assert begun + end - 1e-6 <= request.deadline <= built + end + 1e-6


async def test_what_comes_before_the_engine_is_bounded_too() -> None:
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.01 s passed while its model was loaded"):
        async with RequestLimits(0, 0.01).bounded("its model was loaded"):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):  # somebody else's
        async with RequestLimits(0, 60).bounded("its model was loaded"):
            raise TimeoutError
    async with RequestLimits().bounded("nothing"):
        pass


def test_keys_remember_who_may_push_forward(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    key = keys.add("ann")
    found = keys.find(key)
    assert found is not None and found.limits.most_urgent == 0
    keys.set_limits("ann", UserLimits(most_urgent=-5))
    found = keys.find(key)
    assert found is not None and found.limits.most_urgent == -5
    keys.close()
    with pytest.raises(InvalidRequest, match="most_urgent is 101"):
        UserLimits(most_urgent=101)


def test_a_file_of_keys_from_before_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    store = KeyStore(path)
    key = store.add("ann")
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE limits")
        db.execute(
            "CREATE TABLE limits (user TEXT PRIMARY KEY, requests_per_minute INTEGER, tokens_per_minute INTEGER, "
            "weight REAL NOT NULL) STRICT"
        )
        db.execute("INSERT INTO limits VALUES ('ann', 60, NULL, 2.0)")
    db.close()
    for _ in range(2):
        store = KeyStore(path)
        found = store.find(key)
        store.close()
        assert found is not None and found.limits == UserLimits(60, None, 2.0, 0)


def test_the_python_api_takes_them() -> None:
    with LLM(scripted_model()) as llm:
        before = time.monotonic()
        request = llm.request("a", priority=-5, deadline=60)
        assert request.priority == -5 and request.deadline is not None
        assert before + 60 <= request.deadline <= time.monotonic() + 60
        with pytest.raises(InvalidRequest, match="priority is 101"):
            llm.generate("a", priority=101)
        (output,) = llm.generate("a", SamplingParams(max_tokens=400, ignore_eos=True), deadline=1e-6, use_tqdm=False)
    assert output.outputs[0].finish_reason is FinishReason.DEADLINE
    assert isinstance(output.outputs[0].error, DeadlineExceeded)
