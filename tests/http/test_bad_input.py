"""Invalid input gets a 4xx error that names the value and the limit. Other clients are not affected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.http import HttpSettings
from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.sampling import MAX_STOP_STRINGS
from tests.http.conftest import REPLY
from tests.http.harness import local_client, saying, scripted_model, tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
VOCAB = tokenizer().vocab_size


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    settings = HttpSettings(max_body_bytes=200_000, max_prompts=8, max_choices=16)
    with local_client(scripted_model(next_token=saying(REPLY)), settings) as client:
        yield client


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """Return the error of a response, after checking that it has OpenAI's shape and TGI's field `error_type`."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error", "error_type"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    return dict(body["error"])


def check_alive(client: TestClient) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": "Say", "max_tokens": 100})
    assert answer.json()["choices"][0]["text"] == REPLY


# Body (as JSON text, since some of it is not JSON that a writer would produce), param, part of the message.
BAD_COMPLETIONS = [
    ('{"prompt": "a", "model": "gpt-4"}', "model", "the model 'gpt-4' is not served here; served: 'scripted'"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens", "max_tokens is 0; must be at least 1"),
    ('{"prompt": "a", "max_tokens": -1}', "max_tokens", "max_tokens is -1; must be between 0 and"),
    ('{"prompt": "a", "max_tokens": 9223372036854775808}', "max_tokens", "max_tokens is 9223372036854775808"),
    (
        '{"prompt": "a", "max_tokens": 512}',
        "max_tokens",
        "is 512 tokens; the prompt has 1 tokens, and with max_tokens of 512 that is 513",
    ),
    ('{"prompt": "a", "temperature": NaN}', "temperature", "temperature is nan; must be at least 0"),
    ('{"prompt": "a", "temperature": Infinity}', "temperature", "temperature is inf"),
    ('{"prompt": "a", "temperature": -0.1}', "temperature", "temperature is -0.1"),
    ('{"prompt": "a", "temperature": "hot"}', "temperature", "temperature is 'hot'; input should be a valid number"),
    ('{"prompt": "a", "temperature": true}', "temperature", "temperature is True"),
    ('{"prompt": "a", "top_p": 0}', "top_p", "top_p is 0.0; must be more than 0"),
    ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens", "max_tokens is 1.5; input should be a valid integer"),
    ('{"prompt": "a", "max_tokens": "5"}', "max_tokens", "max_tokens is '5'"),
    ('{"prompt": "a", "n": 1000000}', "n", "n is 1000000; must be between 1 and 64"),
    ('{"prompt": "a", "n": 0}', "n", "n is 0"),
    ('{"prompt": "a", "n": 17}', "n", "1 prompts with n = 17 make 17 choices; at most 16"),
    ('{"prompt": ["a","a","a","a","a","a","a","a","a"]}', "prompt", "prompt has 9 prompts; at most 8"),
    ('{"prompt": "a", "best_of": 1, "n": 2}', "best_of", "best_of is 1; must be at least n (2)"),
    ('{"prompt": "a", "best_of": 2, "stream": true}', "best_of", "not possible with stream"),
    ('{"prompt": "a", "suffix": "b"}', "suffix", "only Ollama's route /api/generate supports fill-in-the-middle"),
    ('{"prompt": "a", "stop": ' + json.dumps(["x"] * 10_000) + "}", "stop", "stop has 10000 strings; at most 64"),
    ('{"prompt": "a", "stop": [1]}', "stop", "stop must be a string or a list of strings"),
    ('{"prompt": "a", "stop": [""]}', "stop", "every entry must be a non-empty string"),
    ('{"prompt": "a", "stop": "' + "x" * 2000 + '"}', "stop", "a stop string has 2000 characters; at most 1024"),
    ('{"prompt": [' + str(VOCAB) + "]}", "prompt", f"prompt holds token {VOCAB}; ids go from 0 to {VOCAB - 1}"),
    ('{"prompt": [0, -1]}', "prompt", "prompt holds token -1"),
    ('{"prompt": [[0], [99999999999999999999]]}', "prompt", "prompt holds token 99999999999999999999"),
    ('{"prompt": [1.5]}', "prompt", "prompt must be a string, a list of strings"),
    ('{"prompt": [1, "a"]}', "prompt", "prompt must be a string, a list of strings"),
    ('{"prompt": [true]}', "prompt", "prompt must be a string, a list of strings"),
    ('{"prompt": []}', "prompt", "prompt must be a string, a list of strings"),
    ('{"prompt": [[]]}', "prompt", "the prompt is empty"),
    ('{"prompt": {}}', "prompt", "prompt must be a string, a list of strings"),
    ('{"prompt": null}', "prompt", "prompt must be a string, a list of strings"),
    ("{}", "prompt", "prompt is required"),
    ("[]", None, "the request body is []"),
    ("null", None, "the request body is None"),
    ('{"prompt": "' + "a" * 600 + '"}', "prompt", "is 512 tokens; the prompt has 600 tokens"),
    ('{"prompt": "' + "a" * 70_000 + '"}', "prompt", "prompt has 70000 characters"),
    ('{"prompt": "a", "logit_bias": {"99999": 1}}', "logit_bias", "logit_bias holds token 99999"),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias", "logit_bias has the key 'x'"),
    ('{"prompt": "a", "logit_bias": {"-1": 1}}', "logit_bias", "logit_bias has the key '-1'"),
    ('{"prompt": "a", "logit_bias": {"1": "a"}}', "logit_bias", "logit_bias[1] must be a number"),
    ('{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias", "logit_bias[1] is nan"),
    ('{"prompt": "a", "logit_bias": {"1": -Infinity}}', "logit_bias", "logit_bias[1] is -inf"),
    (
        '{"prompt": "a", "logit_bias": 1}',
        "logit_bias",
        "logit_bias must be an object that maps token ids to numbers, or a",
    ),
    ('{"prompt": "a", "logit_bias": [1]}', "logit_bias", "must be a pair [token, number]"),
    (
        '{"prompt": "a", "logit_bias": [[1.5, 1]]}',
        "logit_bias",
        "has a pair for '1.5'; the first element of a pair must be a token id",
    ),
    ('{"prompt": "a", "logit_bias": [[1, true]]}', "logit_bias", "logit_bias[1] must be a number"),
    ('{"prompt": "a", "logit_bias": [["", 1]]}', "logit_bias", "logit_bias has a text of 0 characters"),
    ('{"prompt": "a", "speculate": "often"}', "speculate", "speculate is 'often'; must be 'off', 'auto', or a number"),
    ('{"prompt": "a", "speculate": 1.5}', "speculate", "speculate is 1.5; must be 'off', 'auto', or a number of"),
    ('{"prompt": "a", "speculate": true}', "speculate", "speculate is True; must be 'off', 'auto', or a number of"),
    ('{"prompt": "a", "allowed_token_ids": [100000]}', "allowed_token_ids", "holds token 100000; ids go from 0"),
    ('{"prompt": "a", "allowed_token_ids": [1.5]}', "allowed_token_ids", "must be a list of integers"),
    ('{"prompt": "a", "prompt_logprobs": 101}', "prompt_logprobs", "prompt_logprobs is 101; must be between 0 and 100"),
    ('{"prompt": "a", "prompt_logprobs": 1, "stream": true}', "prompt_logprobs", "not possible with stream"),
    ('{"prompt": "a", "stop_token_ids": [-5]}', "stop_token_ids", "stop_token_ids is -5"),
    ('{"prompt": "a", "stop_token_ids": [100000]}', "stop_token_ids", "stop_token_ids holds token 100000"),
    ('{"prompt": "a", "stop_token_ids": "x"}', "stop_token_ids", "must be a list of integers"),
    ('{"prompt": "a", "seed": 18446744073709551616}', "seed", "seed is 18446744073709551616"),
    ('{"prompt": "a", "seed": 1e400}', "seed", "seed is inf"),
    ('{"prompt": "a", "logprobs": 101}', "logprobs", "logprobs is 101; must be between 0 and 100"),
    ('{"prompt": "a", "logprobs": true}', "logprobs", "logprobs is True"),
    ('{"prompt": "a", "stream": "yes"}', "stream", "stream is 'yes'; input should be a valid boolean"),
    ('{"prompt": "a", "stream_options": 1}', "stream_options", "stream_options is 1"),
    ('{"prompt": "a", "min_tokens": 20}', "min_tokens", "min_tokens is 20, more than max_tokens (16)"),
    ('{"prompt": "a", "model": 5}', "model", "model is 5; input should be a valid string"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages is required"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "Hi"}, "messages must be a list of objects"),
    ({"messages": ["Hi"]}, "messages must be a list of objects"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": 3, "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "tool_calls": 3}]}, "messages[0].tool_calls must be a list of function calls"),
    ({"messages": [{"role": "user", "tool_calls": [{"function": 3}]}]}, "must be a list of function calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
     "of type 'image_url'; 'scripted' reads only text"),
    ({"messages": [{"role": "user", "content": "a" * 70_000}]}, "messages has 70000 characters"),
    ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages has 5000 entries; at most 4096"),
    ({"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "send one of them"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_tokens is 0; must be at least 1"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs needs logprobs to be true"),
    ({"messages": HI, "logprobs": True, "top_logprobs": -1}, "logprobs is -1"),
    ({"messages": HI, "logprobs": 5}, "logprobs is 5; input should be a valid boolean"),
    ({"messages": HI, "tools": {}}, "tools must be a list of objects"),
    ({"messages": HI, "tools": [{"type": "retrieval"}]}, "tools[0] must have the type 'function'"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"messages": HI, "tools": [{}] * 129}, "tools has 129 entries; at most 128"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice is 'required', but there are no tools"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format is 'xml'; this server takes 'text'"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema must be"),
    ({"messages": HI, "regex": "a", "choice": ["b"]}, "regex and choice were given; send only one"),
    ({"messages": HI, "regex": "(" * 300 + ")" * 300}, "regex nests 300 brackets; at most 200"),
    ({"messages": HI, "choice": []}, "choice has 0 options; must have 1 to 20000"),
    ({"messages": HI, "constraint": {"regexp": "a"}}, "the constraint has none of regex"),
    ({"messages": HI, "response_format": "text"}, "response_format is 'text'; input should be a valid dictionary"),
    ({"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs may not set 'tokenize'"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs may not set 'messages'"),
    ({"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs may not set 'tools'"),
    ({"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs may not set 'self'"),
    ({"messages": HI, "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs may not set 'a b'"),
    ({"messages": HI, "functions": [{"name": "f"}]}, "functions is not supported here: send functions as `tools`"),
    ({"messages": HI, "function_call": "auto"}, "function_call is not supported here: send `tool_choice`"),
    ({"messages": HI, "modalities": ["text", "audio"]}, "'scripted' writes only text"),
    ({"messages": HI, "audio": {"voice": "ash"}}, "audio is not supported here: bridle's models read text"),
    ({"messages": HI, "web_search_options": {}}, "this server does not search the web"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), BAD_COMPLETIONS)
def test_wrong_completions_are_refused_by_field(client: TestClient, body: str, param: str | None, message: str) -> None:
    status = 404 if param == "model" and "gpt-4" in body else 400
    error = error_of(client.post(COMPLETIONS, content=body), status)
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    check_alive(client)


@pytest.mark.parametrize(("body", "message"), BAD_CHATS)
def test_wrong_chats_are_refused_by_field(client: TestClient, body: dict[str, Any], message: str) -> None:
    error = error_of(client.post(CHAT, json=body), 400)
    assert message in error["message"]
    check_alive(client)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "\xff\xfe"}', "not valid JSON: invalid unicode code point"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"{", "not valid JSON: EOF while parsing"),
        (b"[" * 50_000, "not valid JSON: recursion limit exceeded"),
        (b'{"a":' * 20_000, "not valid JSON: recursion limit exceeded"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "not valid JSON: number out of range"),
        (b"", "the request body is required"),
    ],
)
def test_what_is_no_json(client: TestClient, path: str, content: bytes, message: str) -> None:
    assert message in error_of(client.post(path, content=content), 400)["message"]
    check_alive(client)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types_are_refused_as_browsers_could_send_them(client: TestClient, kind: str) -> None:
    answer = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert "'Content-Type: application/json'" in error_of(answer, 400)["message"]


def test_large_bodies_are_refused_announced_or_not(client: TestClient) -> None:
    content = b'{"prompt": "' + b"a" * 200_000 + b'"}'
    error = error_of(client.post(COMPLETIONS, content=content), 413)
    assert error["message"] == f"the request body has {len(content)} bytes; at most 200000 bytes are accepted"

    def pieces() -> Iterator[bytes]:
        yield content[:100_000]
        yield content[100_000:]

    assert "has more; at most" in error_of(client.post(COMPLETIONS, content=pieces()), 413)["message"]
    check_alive(client)


def test_many_biases_are_one_error() -> None:
    bias = {str(token): "x" for token in range(30_000)}
    with local_client(scripted_model()) as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": "a", "logit_bias": bias}), 400)
        assert error["message"] == "logit_bias[0] must be a number"


def test_bodies_become_sampling_parameters_field_by_field() -> None:
    values: dict[str, Any] = {
        "n": 2, "max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "typical_p": 0.75,
        "min_tokens": 3, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.5, "seed": 11,
        "stop_token_ids": [4], "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    body = CompletionBody.model_validate({"prompt": "a", "stop": "x", "logit_bias": {"3": 1}, "user": "u", **values})
    sampling = body.sampling(max_tokens=body.max_tokens)
    for name, value in values.items():
        assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value)
    assert sampling.stop == ("x",)
    assert sampling.logit_bias == {3: 1.0}


def test_nulls_mean_defaults() -> None:
    names = [name for name in ChatBody.model_fields if name != "messages"]
    body = ChatBody.model_validate({"messages": HI} | dict.fromkeys(names))
    bare = ChatBody.model_validate({"messages": HI})
    assert body.sampling() == bare.sampling()
    assert len(body.stop) <= MAX_STOP_STRINGS
