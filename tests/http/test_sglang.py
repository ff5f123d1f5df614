"""Tests of SGLang's request body on /generate: answers, streams, log-probabilities, and refused fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from bridle.engine.sequence import copy_seed
from tests.http.harness import tokenizer
from tests.waiting import PATIENCE

REPLY = "Hello there, é and the end."


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=PATIENCE) as client:
        yield client


def ask(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json={"text": "Say it:"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    lines = http.post("/generate", json={"text": "Say it:", "stream": True} | body).text.split("\n\n")
    assert [line for line in lines if line][-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def test_an_answer_has_text_tokens_and_counts(http: httpx.Client) -> None:
    answer = ask(http, sampling_params={"temperature": 0}, rid="mine")
    meta = answer["meta_info"]
    assert answer["text"] == REPLY and set(answer) == {"text", "output_ids", "meta_info"}
    assert meta["id"] == "mine" and meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["prompt_tokens"] == len(tokenizer().encode("Say it:")) and meta["e2e_latency"] >= 0
    assert meta["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][-1]}
    ids = ask(http, text=None, input_ids=list(tokenizer().encode("Say it:")), sampling_params={"max_new_tokens": 3})
    assert len(ids["output_ids"]) == 3 and ids["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    stopped = ask(http, sampling_params={"stop": "there"})
    assert stopped["text"] == "Hello " and stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "there"}
    kept = ask(http, sampling_params={"stop": ["there"], "no_stop_trim": True})
    assert kept["text"] == "Hello there"


def test_several_prompts_or_outputs_are_a_list(http: httpx.Client) -> None:
    one, two = ask(http, text=["Say it:", "Again:"], rid="mine", sampling_params=[{"n": 1}, {"n": 1}])
    assert (one["text"], one["meta_info"]["id"], two["meta_info"]["id"]) == (REPLY, "mine_0", "mine_1")
    named = ask(http, text=["Say it:", "Again:"], rid=["a", "b"], sampling_params={"n": 2})
    assert [row["meta_info"]["id"] for row in named] == ["a_0", "a_1", "b_0", "b_1"]
    assert [row["text"] for row in named] == [REPLY] * 4
    numbered = ask(http, text=["Say it:", "Again:"], sampling_params={"n": 2, "sampling_seed": 7})
    assert [row["meta_info"]["seed"] for row in numbered] == [7, copy_seed(7, 1)] * 2
    assert len(ask(http, text=["Say it:"])) == 1
    assert len(ask(http, text=None, input_ids=[[5, 6], [7]])) == 2
    assert isinstance(ask(http, text=None, input_ids=[5, 6]), dict)


def test_each_event_of_a_stream_has_all_so_far(http: httpx.Client) -> None:
    rows = events(http, return_logprob=True)
    whole = ask(http)
    assert rows[-1]["text"] == whole["text"] == REPLY and rows[-1]["output_ids"] == whole["output_ids"]
    for earlier, later in pairwise(rows):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
    assert [row["meta_info"]["finish_reason"] is None for row in rows] == [True] * (len(rows) - 1) + [False]
    assert all(len(row["meta_info"]["output_token_logprobs"]) == len(row["output_ids"]) for row in rows)
    many = events(http, text=["Say it:", "Again:"])
    assert {row["index"] for row in many} == {0, 1}
    assert {row["text"] for row in many if row["meta_info"]["finish_reason"]} == {REPLY}


def test_log_probabilities_have_their_shape(http: httpx.Client) -> None:
    """Log-probabilities have SGLang's form [value, token, text or null]. The first requested token has no value."""
    prompt = list(tokenizer().encode("Say it:"))
    meta = ask(http, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True)[
        "meta_info"
    ]
    assert [row[1] for row in meta["input_token_logprobs"]] == prompt
    assert "".join(row[2] for row in meta["input_token_logprobs"]) == "Say it:"
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    assert all(row[0] <= 0 for row in meta["input_token_logprobs"][1:])
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * meta["completion_tokens"]
    late = ask(http, return_logprob=True, logprob_start_len=2)["meta_info"]
    assert [row[1] for row in late["input_token_logprobs"]] == prompt[2:]
    assert late["input_token_logprobs"][0][2] is None and "input_top_logprobs" not in late
    plain = ask(http, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == [] and len(plain["output_token_logprobs"]) == plain["completion_tokens"]


def test_constraints_hold_on_sglangs_route(http: httpx.Client) -> None:
    for form in ({"regex": "[x-z]{3}"}, {"ebnf": "root ::= [x-z]{3}"}):
        text = ask(http, sampling_params=form | {"max_new_tokens": 9})["text"]
        assert len(text) == 3 and set(text) <= set("xyz")
    schema = json.dumps({"enum": ["a", "b"]})
    assert json.loads(ask(http, sampling_params={"json_schema": schema})["text"]) in ("a", "b")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
    ({"sampling_params": {"stop_regex": "a"}}, "stop_regex is not supported here: use a `regex` constraint"),
    ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params is not supported here: `controller` names"),
    ({"sampling_params": {"stream": True}}, "sampling_params has the unknown parameter 'stream'"),
    ({"sampling_params": {"prompt": "x"}}, "sampling_params has the unknown parameter 'prompt'"),
    ({"sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
    ({"sampling_params": {"structural_tag": "{"}}, "structural_tag is '{'; must be JSON"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params has different values"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor is not supported here: `controller` names"),
    ({"input_embeds": [[0.5]]}, "input_embeds is not supported here"),
    ({"image_data": "x"}, "image_data is not supported here"),
    ({"session_params": {"id": "x"}}, "session_params is not supported here"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob is not supported"),
    ({"temperature": 1}, "temperature is 1, but this route does not accept it"),
    ({"input_ids": [1]}, "must have one of text and input_ids"),
    ({"text": None, "sampling_params": {}}, "must have one of text and input_ids"),
    ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len is -2"),
    ({"return_logprob": True, "top_logprobs_num": 10_000}, "10000"),
    ({"rid": ["a", "b"]}, "rid has 2 request ids for 1 prompts"),
    ({"rid": "x" * 201}, "rid has 201 characters; at most 200"),
    ({"text": 5}, "text"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said_in_its_shape(http: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = http.post("/generate", json={"text": "Say it:"} | body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_an_adapter_and_a_model_that_are_not_there(http: httpx.Client) -> None:
    for body in ({"lora_path": "nobody"}, {"lora_path": ["nobody"]}, {"model": "nobody"}):
        answer = http.post("/generate", json={"text": "Say it:"} | body)
        assert answer.status_code == 404 and "nobody" in answer.json()["error"]["message"]
