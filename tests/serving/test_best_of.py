"""Tests of `best_of`: outputs that cannot win end early, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from bridle import LLM, Controller, Decision, SamplingParams
from bridle.engine.control.decision import Branch
from bridle.engine.outputs.best_of import Contest
from bridle.engine.sequence import copy_seed
from bridle.errors import InvalidRequest
from bridle.http import create_app
from bridle.outputs import Finished, FinishReason, Forked, Logprob, Rewind, TokenEvent, Usage
from bridle.serving import ModelRegistry, best_outputs
from tests.conftest import examples

PROMPT = "Once upon a time"
#: Texts of very different lengths.
CONSTRAINTS: list[dict[str, Any]] = [{}, {"regex": "[a-z]{1,3}|[a-z ]{30,60}"}, {"regex": "yes|no|( never)+"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_blocks=256) as made:
        yield made


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    n=st.integers(2, 6),
    num_wanted=st.integers(1, 3),
    temperature=st.sampled_from([0.7, 1.5]),
    form=st.sampled_from(CONSTRAINTS),
)
def test_the_winners_are_the_same(
    llm: LLM, seed: int, n: int, num_wanted: int, temperature: float, form: dict[str, Any]
) -> None:
    params = SamplingParams(n=n, seed=seed, temperature=temperature, max_tokens=40, logprobs=0)
    ask = {"use_tqdm": False, **form}
    (whole,) = llm.generate(PROMPT, params, **ask)
    (short,) = llm.generate(PROMPT, params.with_(keep_best=num_wanted), **ask)
    wanted, found = (best_outputs(each.outputs, min(num_wanted, n)) for each in (whole, short))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.logprobs for each in found] == [each.logprobs for each in wanted]
    for one, other in zip(whole.outputs, short.outputs, strict=True):
        if other.finish_reason is FinishReason.OUTRANKED:
            assert other.token_ids == one.token_ids[: len(other.token_ids)]
            assert other.usage.spared_tokens == 40 - len(other.token_ids) > 0
        else:
            assert other.token_ids == one.token_ids and not other.usage.spared_tokens


#: Many outputs are complete at once, and the others need not go on for long. The constraint holds for all.
EARLY: dict[str, Any] = {"seed": 3, "temperature": 3.0, "max_tokens": 60, "stop": [" was"], "regex": " [a-z ]{150}"}


def test_losers_are_ended(llm: LLM) -> None:
    (output,) = llm.generate(f"{PROMPT} there", n=8, logprobs=0, keep_best=1, use_tqdm=False, **EARLY)
    reasons = [each.finish_reason for each in output.outputs]
    assert reasons.count(FinishReason.OUTRANKED) >= 2 and FinishReason.STOP in reasons
    assert output.usage.spared_tokens > 100
    assert llm.statistics().finished["outranked"]


def test_text_that_may_be_taken_back_is_not_judged_early(llm: LLM) -> None:
    class Plain(Controller):
        def next(self, view: Any) -> Decision:
            return Decision.sample()

    params = SamplingParams(n=6, seed=3, temperature=2.0, max_tokens=30, logprobs=0, keep_best=1)
    for given_, changes in (({"controller": Plain()}, {}), ({}, {"banned_phrases": ("zzz",)})):
        (output,) = llm.generate(PROMPT, params.with_(**changes), use_tqdm=False, **given_)
        assert FinishReason.OUTRANKED not in [each.finish_reason for each in output.outputs]


def test_outputs_are_compared_by_their_logprobs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="keep_best: it compares outputs by their logprobs"):
        llm.generate(PROMPT, n=2, keep_best=1)


def token(index: int, logprob: float) -> TokenEvent:
    return TokenEvent("r", index, 5, "", Logprob(5, logprob), False)


SCORES = st.lists(st.floats(-5.0, 0.0), max_size=8)


@given(first=SCORES, then=SCORES, taken=st.integers(0, 8), rival=st.floats(-5.0, 0.0), room=st.integers(1, 16))
def test_an_output_is_lost_only_if_no_end_of_it_wins(
    first: list[float], then: list[float], taken: int, rival: float, room: int
) -> None:
    """An output ends early only if its mean stays below the rival's with any further tokens, also after rollbacks and
    in forks."""
    contest = Contest(1)
    for score in first:
        contest.add(token(0, score))
    kept = first[: len(first) - min(taken, len(first))]
    contest.add(Rewind("r", 0, min(taken, len(first)), 0))
    contest.add(Forked("r", 1, 0, len(kept), ""))
    for index in (0, 1):
        for score in then:
            contest.add(token(index, score))
    contest.add(token(2, rival))
    contest.add(Finished("r", 2, FinishReason.STOP, Usage()))
    scores, num_most = kept + then, len(kept + then) + room
    best = max(sum(scores) / size for size in range(max(len(scores), 1), num_most + 1))
    for index in (0, 1):
        assert not contest.is_lost(index, num_most) or best < rival
        assert contest.is_lost(index, num_most) == (best < rival - 1e-6) or abs(best - rival) < 1e-5


def test_routes_return_the_best_and_say_what_was_saved(llm: LLM) -> None:
    registry = ModelRegistry([llm.model])
    client = TestClient(create_app(registry))
    answer = client.post("/v1/completions", json=EARLY | {"prompt": f"{PROMPT} there", "n": 1, "best_of": 8}).json()
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens_details"]["spared_tokens"] > 100
    given_ = {"best_of": 4, "temperature": 2.0, "do_sample": True, "max_new_tokens": 60, "details": False}
    native = client.post("/generate", json={"inputs": PROMPT, "parameters": given_})
    assert native.status_code == 200 and native.json()["generated_text"]
    detailed = client.post("/generate", json={"inputs": PROMPT, "parameters": given_ | {"details": True}}).json()
    assert len(detailed["details"]["best_of_sequences"]) == 3
    assert not any(each["usage"]["spared_tokens"] for each in detailed["details"]["best_of_sequences"])


#: Requests for several choices, with the paths that answer them.
SEVERAL: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"n": 3}),
    ("/v1/completions", {"n": 2, "best_of": 4}),
    ("/v1/completions", {"n": 2, "choice": ["red", "green", "blue", "reddish"]}),
    ("/v1/chat/completions", {"n": 3}),
]


STREAMED = [(path, several | {"stream": True}) for path, several in SEVERAL if "best_of" not in several]


@pytest.mark.parametrize(("path", "several"), SEVERAL + STREAMED)
def test_the_seed_of_each_choice_repeats_it_alone(llm: LLM, path: str, several: dict[str, Any]) -> None:
    client = TestClient(create_app(ModelRegistry([llm.model])))
    said = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    body = {"temperature": 2.0, "max_tokens": 12, **said}
    kept = {name: value for name, value in several.items() if name == "choice"}
    found = _choices(client, path, body | several)
    assert len({seed for seed, _ in found}) == len(found) == several["n"]
    for seed, text in found:
        assert _choices(client, path, body | kept | {"seed": seed}) == [(seed, text)]


def _choices(client: TestClient, path: str, body: dict[str, Any]) -> list[tuple[int, str]]:
    """Return the seed and the text of each choice of an answer."""
    answer = client.post(path, json=body)
    if not body.get("stream"):
        return [(each["seed"], _text(each)) for each in answer.json()["choices"]]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if "choices" in line]
    parts = [each for line in lines for each in json.loads(line)["choices"]]
    seeds = {each["index"]: each["seed"] for each in parts if "seed" in each}
    return [(seed, "".join(_text(each) for each in parts if each["index"] == index)) for index, seed in seeds.items()]


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def test_outputs_in_python_have_seeds_that_repeat_them(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=2.0, max_tokens=12, seed=-1, logprobs=0)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert [each.seed for each in output.outputs] == [copy_seed(-1, copy) for copy in range(4)]
    assert all(-1 <= copy_seed(-1, copy) < 1 << 53 for copy in range(4))  # exact in every JSON reader
    for each in best_outputs(output.outputs, 2):
        alone = llm.generate(PROMPT, params.with_(n=1, seed=each.seed), use_tqdm=False)
        assert alone[0].outputs[0].token_ids == each.token_ids


class Split(Controller):
    """A controller that forks at once."""

    def next(self, view: Any) -> Decision:
        return Decision.sample() if view.generated else Decision.fork([Branch(), Branch()])


def test_copies_of_a_fork_are_those_of_their_seeds(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=8, seed=5, ignore_eos=True)
    (both,) = llm.generate(PROMPT, params.with_(n=2), controller=Split(), use_tqdm=False)
    single = [
        llm.generate(PROMPT, params.with_(seed=seed), controller=Split(), use_tqdm=False)[0]
        for seed in (5, copy_seed(5, 1))
    ]
    assert [each.token_ids for each in both.outputs] == [each.token_ids for one in single for each in one.outputs]
    assert [each.seed for each in both.outputs] == [5, None, None, None]
    assert [each.seed for each in single[1].outputs] == [copy_seed(5, 1)] * 2
