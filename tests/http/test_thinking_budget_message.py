"""Reasoning that reaches its budget ends with the sentence from the request, the operator or a policy, on each API.
After that sentence, the answer follows."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bridle import LLM
from bridle.errors import InvalidRequest
from bridle.http import HttpSettings
from bridle.serving.policies import PolicyRegistry, read_policies
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_settings import ChatSettings
from tests.http.harness import NAME, local_client, saying, scripted_model, tokenizer_folder
from tests.leftovers import kept_folder

USER = [{"role": "user", "content": "hi"}]
SENTENCE = "Now I must answer."
BUDGET: dict[str, Any] = {"thinking_budget": 6}
RUN = {"messages": USER, "controller": "none", "controller_arg": None, "max_tokens": 60}
#: For each API: a body with a budget of six tokens.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 60, **BUDGET},
    "/v1/responses": {"input": "hi", "max_output_tokens": 60, **BUDGET},
    "/v1/messages": {"messages": USER, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 6}},
    "/api/chat": {"messages": USER, "stream": False, "think": True, **BUDGET},
    "/api/generate": {"prompt": "hi", "stream": False, "think": True, **BUDGET},
    "/v1/run": {**RUN, **BUDGET},
}


@cache
def tokenizer() -> Tokenizer:
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder())
    fast.add_tokens(["<think>", "</think>"])
    fast.chat_template = str(fast.chat_template) + "{# <think> </think> #}"
    folder = kept_folder("bridle-http-tests-")
    fast.save_pretrained(folder)
    return Tokenizer.load(folder)


def model_that_thinks(operator: str = "") -> Any:
    """Return a model that reasons until its budget ends, and then answers."""
    text = tokenizer()
    text.chat_settings = ChatSettings(thinking_budget_message=operator)
    closing = text.id_of("</think>")
    thinks, answers = saying("<think>" + "no, " * 40, text), saying("Yes.", text)
    return scripted_model(text=text, next_token=lambda prefix: (answers if closing in prefix else thinks)(prefix))


def parts_of(route: str, body: Any) -> tuple[str, str]:
    """Return the thoughts and the answer of a response."""
    match route:
        case "/v1/chat/completions":
            message = body["choices"][0]["message"]
            return message["reasoning_content"], message["content"]
        case "/v1/responses":
            thoughts, message = body["output"]
            return thoughts["content"][0]["text"], message["content"][0]["text"]
        case "/v1/messages":
            return body["content"][0]["thinking"], body["content"][1]["text"]
        case "/api/chat":
            return body["message"]["thinking"], body["message"]["content"]
    return body["thinking"], body["response"]


def text_of_run(answer: str) -> str:
    rows = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(fork["text"] for row in rows for fork in row.get("forks", ()))


def asked(route: str, operator: str = "", **fields: Any) -> tuple[str, str]:
    with local_client(model_that_thinks(operator)) as client:
        answer = client.post(route, json={"model": NAME, "temperature": 0, **BODIES[route], **fields})
        assert answer.status_code == 200, answer.text
        if route == "/v1/run":
            thoughts, _, text = text_of_run(answer.text).removeprefix("<think>").partition("\n</think>\n\n")
            return thoughts, text
        return parts_of(route, answer.json())


@pytest.mark.few(3)
@pytest.mark.parametrize("route", BODIES)
def test_the_sentence_ends_thoughts_that_reach_their_budget(route: str) -> None:
    said = "no, no"
    field = {"thinking_budget_message": SENTENCE}
    assert asked(route, **field) == (f"{said}\n{SENTENCE}", "Yes.")
    assert asked(route, operator="Enough.") == (f"{said}\nEnough.", "Yes.")
    assert asked(route, operator="Enough.", **field) == (f"{said}\n{SENTENCE}", "Yes.")
    assert asked(route, operator="Enough.", thinking_budget_message="") == (said, "Yes.")
    assert asked(route, thinking_budget_message=" ...\n\nWell.") == (f"{said} ...\n\nWell.", "Yes.")


def test_a_program_and_llama_cpps_clients_have_it_too() -> None:
    with LLM(model_that_thinks("Enough.")) as llm:
        (output,) = llm.chat(USER, thinking_budget=6, max_tokens=60)
        assert output.message is not None and output.message.thoughts == "no, no\nEnough."
        (output,) = llm.chat(USER, thinking_budget=6, thinking_budget_message=SENTENCE, max_tokens=60)
        assert output.message is not None and output.message.thoughts == f"no, no\n{SENTENCE}"
    fields = {"thinking_budget": None, "reasoning_budget": 6, "reasoning_budget_message": SENTENCE}
    assert asked("/v1/chat/completions", **fields) == (f"no, no\n{SENTENCE}", "Yes.")


def test_thoughts_that_end_in_time_get_no_sentence() -> None:
    text = tokenizer()
    text.chat_settings = ChatSettings()
    with local_client(scripted_model(text=text, next_token=saying("<think>no</think>Yes.", text))) as client:
        body = {"model": NAME, **BODIES["/v1/chat/completions"], "thinking_budget_message": SENTENCE}
        assert parts_of("/v1/chat/completions", client.post("/v1/chat/completions", json=body).json()) == ("no", "Yes.")


@pytest.mark.parametrize(
    ("own", "sentence"), [({"message": SENTENCE}, f"\n{SENTENCE}"), ({}, "\nEnough."), ({"message": ""}, "")]
)
def test_a_policy_has_it_for_every_text(own: dict[str, str], sentence: str) -> None:
    policy = {"name": "short", "kind": "thinking", "max_tokens": 6, **own}
    settings = HttpSettings(policies=PolicyRegistry(current=read_policies({"policy": [policy]})))
    with local_client(model_that_thinks("Enough."), settings) as client:
        body = {"model": NAME, "prompt": "hi", "max_tokens": 60, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert answer == f"<think>no, no{sentence}</think>Yes."


@pytest.mark.few(8)
@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"thinking_budget_message": "ends </think> here"}, "may not have the special token </think>"),
        ({"thinking_budget_message": "<|im_end|>"}, "may not have the special token <|im_end|>"),
        ({"thinking_budget_message": "x" * 3000}, "got 3000 characters; at most 2000"),
        ({"thinking_budget": None, "thinking": None, "thinking_budget_message": "x"}, "Set thinking_budget too"),
    ],
)
def test_other_sentences_are_refused(route: str, fields: dict[str, Any], error: str) -> None:
    if route != "/v1/messages" and fields.get("thinking", 1) is None:
        fields = {name: value for name, value in fields.items() if name != "thinking"}
    with local_client(model_that_thinks()) as client:
        answer = client.post(route, json={"model": NAME, **BODIES[route], **fields})
        assert answer.status_code == 400 and error in answer.text


def test_an_operators_sentence_that_cannot_be_is_refused_where_the_budget_is_asked_for() -> None:
    with LLM(model_that_thinks("</think>")) as llm, pytest.raises(InvalidRequest, match="thinking_budget_message"):
        llm.chat(USER, thinking_budget=6)
