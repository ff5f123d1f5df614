"""Tests that fields of other servers have the same effect on bridle's APIs as on those servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http.harness import scripted_model, served, tokenizer
from tests.http.routes import ROUTES, of_eight, post, text_of

ALLOWED = tuple(tokenizer().encode("xyz", False))


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with served(scripted_model()) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
def test_only_allowed_tokens_are_drawn(server: httpx.Client, route: str) -> None:
    for more in ({}, {"temperature": 1.0, "speculate": 4}):
        text = text_of(post(server, route, of_eight(route, {"allowed_token_ids": list(ALLOWED)} | more)))
        assert len(text) == 8 and set(text) <= set("xyz")


@pytest.mark.parametrize("route", ROUTES)
def test_banned_strings_do_not_come(server: httpx.Client, route: str) -> None:
    """The strings of both field names never occur in the output, however many tokens spell them."""
    seed = {} if route == "/v1/run" else {"seed": 3}  # AICI's route is greedy, and has none
    fields = of_eight(route, {"allowed_token_ids": list(ALLOWED), **seed})
    free = text_of(post(server, route, fields))
    banned = free[2:5]
    texts = [text_of(post(server, route, fields | {name: [banned]})) for name in ("banned_strings", "banned_phrases")]
    assert texts[0] == texts[1] and banned not in texts[0] and texts[0][:2] == free[:2]


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_a_constraint_and_allowed_tokens_hold_together(server: httpx.Client, route: str) -> None:
    fields = {"allowed_token_ids": list(ALLOWED), "regex": "([w-y][x-z]){4}", "ignore_eos": True}
    text = text_of(post(server, route, of_eight(route, fields)))
    assert len(text) == 8 and set(text[::2]) <= set("xy") and set(text[1::2]) <= set("xyz")
    nothing = {"allowed_token_ids": list(ALLOWED), "regex": "[ab]{2}"}
    refusal = post(server, route, of_eight(route, nothing))
    assert refusal.status_code >= 400 and "no token can be drawn" in refusal.text


@pytest.mark.parametrize("route", ROUTES)
def test_biases_may_be_pairs_of_ids_or_texts(server: httpx.Client, route: str) -> None:
    x, y, _ = ALLOWED
    for pairs in ([[x, 100], [y, 100], [y, False]], [["x", 100]], [["xx", 50], [x, 50]]):
        assert text_of(post(server, route, of_eight(route, {"logit_bias": pairs}))) == "x" * 8


def test_the_tokens_of_a_prompt_have_vllms_shape(server: httpx.Client) -> None:
    ids = tokenizer().encode("Say", False)
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2, "n": 2}
    answer = server.post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == len(ids) - 1
        for token, found in zip(ids[1:], others, strict=True):
            own = found[str(token)]
            assert set(own) == {"logprob", "rank", "decoded_token"} and own["decoded_token"] == chr(
                tokenizer().token_bytes(token)[0]
            )
            assert 2 <= len(found) <= 3 and {1, 2} <= {each["rank"] for each in found.values()}
            assert all((each["rank"] < own["rank"]) == (each["logprob"] > own["logprob"]) for each in found.values())
    echoed = server.post("/v1/completions", json=body | {"n": 1, "echo": True, "logprobs": 1}).json()["choices"][0]
    assert [own[str(token)]["logprob"] for token, own in zip(ids[1:], echoed["prompt_logprobs"][1:], strict=True)] == (
        echoed["logprobs"]["token_logprobs"][1 : len(ids)]
    )
    assert {len(each) for each in echoed["logprobs"]["top_logprobs"][1:]} <= {1, 2}  # as `logprobs` says
    assert "prompt_logprobs" not in server.post("/v1/completions", json=body | {"prompt_logprobs": None}).text


def test_chats_have_them_for_their_whole_prompt(server: httpx.Client) -> None:
    answer = post(server, "/v1/chat/completions", {"prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and all(len(each) == 1 for each in answer["prompt_logprobs"][1:])
    refusal = post(server, "/v1/chat/completions", {"prompt_logprobs": 0, "stream": True})
    assert refusal.json()["error"]["param"] == "prompt_logprobs"


def test_bans_in_one_text_are_read(server: httpx.Client) -> None:
    x, y, _ = ALLOWED
    fields = {"allowed_token_ids": [x, y], "custom_token_bans": f"{x}, 5"}
    assert text_of(post(server, "/v1/completions", of_eight("/v1/completions", fields))) == "y" * 8
    with_bias = post(server, "/v1/completions", {"custom_token_bans": "5", "logit_bias": {"5": 1}})
    assert "are names of the same field" in with_bias.json()["error"]["message"]


BEAMS = {"prompt": ["Say", "Tell"], "max_tokens": 5, "use_beam_search": True, "best_of": 4, "n": 2, "temperature": 0}


def test_completions_search_beams(server: httpx.Client) -> None:
    answer = server.post("/v1/completions", json=BEAMS | {"length_penalty": 0.5, "logprobs": 0}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for first, second in (answer["choices"][:2], answer["choices"][2:]):
        assert first["score"] >= second["score"] and first["text"] != second["text"]
        for choice in (first, second):
            logprobs = choice["logprobs"]["token_logprobs"]
            assert choice["score"] == pytest.approx(sum(logprobs) / len(logprobs) ** 0.5)
            assert choice["finish_reason"] in ("stop", "length")
    greedy = server.post("/v1/completions", json=BEAMS | {"best_of": 1, "n": 1}).json()["choices"]
    plain = server.post("/v1/completions", json={"prompt": BEAMS["prompt"], "max_tokens": 5, "temperature": 0}).json()
    assert [choice["text"] for choice in greedy] == [choice["text"] for choice in plain["choices"]]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stream": True}, "use_beam_search is true, which is not possible with stream"),
        ({"regex": "a"}, "use_beam_search cannot be combined with a controller or a constraint"),
        ({"top_k": 3}, "top_k cannot be combined with beam search"),
        ({"stop": "x"}, "stop cannot be combined with beam search"),
        ({"temperature": 0.5}, "temperature is 0.5; with beam search"),
        ({"best_of": 33}, "the beam width is 33; must be between 1 and 32"),
        ({"logprobs": 2}, "logprobs is 2; with beam search it must be 0"),
        ({"length_penalty": 11}, "length_penalty is 11.0; must be a number from -10 to 10"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty is 2.0; it needs use_beam_search"),
    ],
)
def test_what_does_not_go_with_beams(server: httpx.Client, fields: dict[str, Any], told: str) -> None:
    refusal = server.post("/v1/completions", json=BEAMS | {"prompt": "Say"} | fields)
    assert refusal.status_code == 400 and told in refusal.json()["error"]["message"]


CHAT = {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 5, "temperature": 0}


def test_chats_search_beams(server: httpx.Client) -> None:
    """Beam search of a chat equals beam search of a completion with the chat's rendered prompt."""
    asked = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5}
    answer = server.post("/v1/chat/completions", json=CHAT | asked | {"logprobs": True}).json()
    ids = server.post("/chat_tokenize", json={"messages": CHAT["messages"]}).json()
    prompt = [token["id"] for token in ids["tokenize_response"]]
    bare = server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, "logprobs": 0} | asked).json()
    for found, expected in zip(answer["choices"], bare["choices"], strict=True):
        assert (
            found["message"]["content"] == expected["text"].strip() or expected["text"] == found["message"]["content"]
        )
        assert (found["index"], found["score"]) == (expected["index"], expected["score"])
        logprobs = [token["logprob"] for token in found["logprobs"]["content"]]
        assert logprobs == pytest.approx(expected["logprobs"]["token_logprobs"])
    greedy = server.post("/v1/chat/completions", json=CHAT | {"use_beam_search": True}).json()["choices"]
    plain = server.post("/v1/chat/completions", json=CHAT).json()["choices"]
    assert [each["message"] for each in greedy] == [each["message"] for each in plain]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stream": True}, "use_beam_search is true, which is not possible with stream"),
        ({"regex": "a"}, "use_beam_search cannot be combined with a controller or a constraint"),
        ({"max_tokens": None}, "max_tokens is missing; beam search needs it"),
        ({"best_of": 1, "n": 2}, "best_of is 1; must be at least n (2)"),
        ({"use_beam_search": False, "best_of": 3}, "best_of is 3; in chat completions it needs use_beam_search"),
        ({"logprobs": True, "top_logprobs": 2}, "logprobs is 2; with beam search it must be 0"),
    ],
)
def test_what_does_not_go_with_beams_of_chats(server: httpx.Client, fields: dict[str, Any], told: str) -> None:
    refusal = server.post("/v1/chat/completions", json=CHAT | {"use_beam_search": True} | fields)
    assert refusal.status_code == 400 and told in refusal.json()["error"]["message"]


HAVE_BEAMS = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in HAVE_BEAMS])
def test_other_routes_say_that_they_search_no_beams(server: httpx.Client, route: str) -> None:
    off = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    assert post(server, route, off).status_code == 200
    refusal = post(server, route, {"use_beam_search": True}).text
    assert "use_beam_search is True, but this route does not accept it" in refusal
    assert all(where in refusal for where in HAVE_BEAMS)
