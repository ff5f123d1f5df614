"""While a model is paused, nothing is computed and requests wait or end. Outputs are the same as without a pause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from bridle import LLM, SamplingParams
from bridle.config import EngineConfig
from bridle.engine import Engine
from bridle.engine.async_engine import AsyncEngine
from bridle.errors import UnsupportedFeature
from bridle.http import create_app
from bridle.outputs import Event, Finished, FinishReason, TokenEvent
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from bridle.testing.async_executor import LateScriptedExecutor
from bridle.testing.clock import FakeClock
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.support import make_request
from tests.http.harness import scripted_model
from tests.serving.fakes import fake_model

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(scripted_model(spread=4096)) as made:
        yield made


def engine_of(llm: LLM) -> Engine:
    client = llm.model.client
    assert isinstance(client, AsyncEngine)
    return client._engine


def test_outputs_are_as_without_a_pause(llm: LLM) -> None:
    (wanted,) = llm.generate("Say it", PARAMS, use_tqdm=False)
    stream = iter(llm.stream("Say it", PARAMS))
    text = next(stream)
    llm.pause()
    llm.pause()
    assert llm.model.is_paused
    llm.resume()
    assert text + "".join(stream) == wanted.text
    assert not llm.model.is_paused


def test_a_paused_engine_takes_requests_and_computes_none() -> None:
    """The test calls the engine directly, step by step."""
    engine = Engine(ScriptedExecutor(), EngineConfig())
    engine.add(make_request(id="a", max_tokens=4))
    before = engine.step()
    engine.is_paused = True
    engine.add(make_request(id="b", max_tokens=4))
    during = [event for _ in range(20) for event in engine.step()]
    assert engine.has_work and engine.is_stalled
    assert not [event for event in during if isinstance(event, TokenEvent)]
    engine.cancel("b")
    ended = [event for event in engine.step() if isinstance(event, Finished)]
    assert [(event.request_id, event.reason) for event in ended] == [("b", FinishReason.CANCELLED)]
    engine.is_paused = False
    assert len(tokens_of(engine, before)["a"]) == 4
    engine.close()


def tokens_of(engine: Engine, events: list[Event], pauses: Sequence[bool] = ()) -> dict[str, list[int]]:
    """Return the tokens of each request after the engine has computed all. The engine is paused in the steps that
    `pauses` lists."""
    for is_paused in pauses:
        engine.is_paused = is_paused
        events += engine.step()
    engine.is_paused = False
    while engine.has_work:
        events += engine.step()
    found: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            found.setdefault(event.request_id, []).append(event.token)
    return found


@given(pauses=st.lists(st.booleans(), max_size=30), is_async=st.booleans())
def test_pauses_change_nothing(pauses: list[bool], is_async: bool) -> None:
    """Pauses change nothing, even if a step starts before the tokens of the previous step are known."""

    def run(pauses: Sequence[bool]) -> dict[str, list[int]]:
        clock = FakeClock()
        executor = LateScriptedExecutor(clock=clock) if is_async else ScriptedExecutor()
        engine = Engine(executor, EngineConfig(max_num_batched_tokens=8), clock=clock)
        for name in "abc":
            engine.add(make_request(tuple(range(1, 8)), id=name, max_tokens=6, temperature=1.0, seed=ord(name)))
        found = tokens_of(engine, [], pauses)
        engine.close()
        return found

    assert run(pauses) == run(())


def test_admins_pause_and_resume(llm: LLM, tmp_path: Any) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    client = TestClient(create_app(ModelRegistry([llm.model]), keys=keys))
    user = {"authorization": f"Bearer {keys.add('ann')}"}
    admin = {"authorization": f"Bearer {keys.add('root', is_admin=True)}"}
    for path in ("/v1/pause", "/v1/resume"):
        assert client.post(path, json={}, headers=user).status_code == 403
    assert client.post("/v1/pause", json={}, headers=admin).json() == {"model": "scripted", "paused": True}
    assert client.get("/v1/pause", headers=user).json()["paused"] is True
    assert engine_of(llm).is_paused
    assert client.post("/v1/resume", json={}, headers=admin).json()["paused"] is False
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=user).status_code == 200
    assert client.post("/v1/pause", json={"mode": "later"}, headers=admin).status_code == 400
    keys.close()


def test_an_abort_ends_what_runs(llm: LLM) -> None:
    stream = iter(llm.stream("Say it", PARAMS.with_(max_tokens=400)))
    next(stream)
    llm.model.pause(cancels=True)
    engine = engine_of(llm)
    list(stream)
    assert not engine.request_ids
    llm.resume()
    assert llm.generate("Say it", PARAMS, use_tqdm=False)[0].text


def test_replicas_are_not_paused() -> None:
    model = fake_model(name="demo")
    with pytest.raises(UnsupportedFeature, match="runs in replicas"):
        model.pause()


def test_logprobs_while_generating_are_those_of_scoring() -> None:
    """On a CPU the log-probabilities are equal bit for bit, because they do not depend on the step that computes a
    token."""
    with LLM("demo", num_blocks=256) as llm:
        prompts = ["Once upon a time", "The boy", "She was very happy because"]
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, logprobs=0, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
        for output, score in zip(outputs, llm.score(texts, use_tqdm=False), strict=True):
            reported = [entry.logprob for entry in output.outputs[0].logprobs or ()]
            scored = [entry.logprob for entry in score.logprobs[-len(reported) :] if entry is not None]
            assert len(reported) == 24 and reported == scored
