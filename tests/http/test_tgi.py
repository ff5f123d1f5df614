"""Tests of text-generation-inference's routes by plain HTTP: bodies, answers, streams, headers, errors."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle.config import EngineConfig
from bridle.engine.request import Request
from bridle.http import HttpSettings
from bridle.http.sse import SseWriter
from bridle.http.tgi.answer import TgiResponse
from bridle.http.tgi.plan import plan_of
from bridle.http.tgi.schemas import Parameters
from bridle.outputs import Event, Finished, FinishReason, Log, Logprob, PromptEvent, Rewind, TokenEvent
from bridle.sampling import SamplingParams
from bridle.serving.lifecycle.generation import Generation, SubRequest
from tests.http.harness import local_client, overdue_model, scripted_model, served, tokenizer
from tests.serving.fakes import fake_model, served_by
from tests.waiting import PATIENCE

REPLY = "Hello there, é and the end."


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def random_http(random_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=random_server, timeout=PATIENCE) as client:
        yield client


def _generate(http: httpx.Client, path: str = "/generate", inputs: str = "Say it:", **parameters: Any) -> Any:
    response = http.post(path, json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()


def _events(http: httpx.Client, inputs: str = "Say it:", **parameters: Any) -> list[dict[str, Any]]:
    body = {"inputs": inputs, "parameters": parameters}
    text = http.post("/generate_stream", json=body).text
    assert "[DONE]" not in text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_an_answer_is_just_its_text(http: httpx.Client) -> None:
    assert _generate(http) == {"generated_text": REPLY}
    assert _generate(http, return_full_text=True) == {"generated_text": "Say it:" + REPLY}


def test_details_tell_each_token(http: httpx.Client) -> None:
    details = _generate(http, details=True, decoder_input_details=True)["details"]
    assert details["finish_reason"] == "eos_token" and details["seed"] is None
    assert details["generated_tokens"] == len(details["tokens"])
    assert "".join(row["text"] for row in details["tokens"] if not row["special"]) == REPLY
    assert details["tokens"][-1]["special"] and details["tokens"][-1]["id"] in tokenizer().eos_token_ids
    assert "".join(row["text"] for row in details["prefill"]) == "Say it:"
    assert details["prefill"][0]["logprob"] is None and details["prefill"][1]["logprob"] <= 0
    assert details["usage"]["sampled_tokens"] == details["generated_tokens"]
    assert "top_tokens" not in details and "best_of_sequences" not in details


def test_the_root_answers_with_a_list_and_the_whole_text(http: httpx.Client) -> None:
    assert _generate(http, "/") == [{"generated_text": "Say it:" + REPLY}]
    assert _generate(http, "/", return_full_text=False) == [{"generated_text": REPLY}]
    response = http.post("/", json={"inputs": "Say it:", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")


def test_the_root_is_a_page_for_browsers_and_health_for_others(http: httpx.Client) -> None:
    assert "<html" in http.get("/", headers={"accept": "text/html,*/*"}).text
    assert http.get("/").json() == {"status": "ready"}


def test_a_stream_has_an_event_for_each_token(http: httpx.Client) -> None:
    events = _events(http, details=True, top_n_tokens=2)
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == REPLY
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    assert events[-1]["generated_text"] == REPLY
    assert events[-1]["details"]["input_length"] == len(tokenizer().encode("Say it:"))
    assert all(len(event["top_tokens"]) == 2 for event in events)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/invocations"])
def test_an_image_is_refused_by_name(http: httpx.Client, path: str) -> None:
    """Requests with an image in the form of vision clients are refused by name, while a bare image URL is plain
    text."""
    answer = http.post(path, json={"inputs": "![](data:image/png;base64,AAAA)What is this?"})
    assert answer.status_code == 422 and "inputs has an image; 'scripted' reads only text" in answer.json()["error"]
    assert http.post(path, json={"inputs": "![](http://host/a.png)"}).status_code == 200


@pytest.mark.parametrize("stop", ["there", "ere, "])
def test_stop_strings_match_anywhere_and_stay(http: httpx.Client, stop: str) -> None:
    want = REPLY[: REPLY.index(stop) + len(stop)]
    answer = _generate(http, stop=[stop], details=True)
    assert answer["generated_text"] == want and answer["details"]["finish_reason"] == "stop_sequence"
    events = _events(http, stop=[stop])
    assert "".join(event["token"]["text"] for event in events) == want == events[-1]["generated_text"]


def test_length_ends_an_answer_and_the_prompt_can_be_cut(http: httpx.Client) -> None:
    answer = _generate(http, max_new_tokens=2, details=True, decoder_input_details=True, truncate=3)
    assert answer["details"]["finish_reason"] == "length" and answer["details"]["generated_tokens"] == 2
    assert len(answer["details"]["prefill"]) == 3


def test_a_prompt_is_cut_before_it_is_measured(http: httpx.Client) -> None:
    """The prompt is truncated on every native route, even if the whole prompt would exceed the context."""
    text = "q; " * 1000 + "Say it:"
    cut = _generate(http, inputs=text, truncate=9, details=True, decoder_input_details=True)
    assert [row["id"] for row in cut["details"]["prefill"]] == tokenizer().encode(text)[-9:]
    assert cut["generated_text"] == REPLY
    assert _events(http, inputs=text, truncate=9, details=True)[-1]["details"]["input_length"] == 9
    for path in ("/", "/invocations"):
        assert _generate(http, path, text, truncate=9) == [{"generated_text": text + REPLY}]
        assert http.post(path, json={"inputs": text}).status_code == 422
    assert _generate(http, inputs="x" * 100_000 + "Say it:", truncate=3) == {"generated_text": REPLY}


def test_sampling_is_replayed_by_its_seed(random_http: httpx.Client) -> None:
    first = _generate(random_http, do_sample=True, max_new_tokens=12, details=True)
    seed = first["details"]["seed"]
    assert (
        _generate(random_http, do_sample=True, max_new_tokens=12, seed=seed)["generated_text"]
        == (first["generated_text"])
    )
    greedy = {_generate(random_http, max_new_tokens=12)["generated_text"] for _ in range(2)}
    assert len(greedy) == 1


@pytest.mark.parametrize("neutral", [{"top_p": 1.0}, {"typical_p": 1.0}, {"top_k": 0}, {"min_p": 0.0}])
def test_a_value_that_switches_a_filter_off_asks_for_nothing(random_http: httpx.Client, neutral: Any) -> None:
    """Values that switch filters off change nothing. The answer stays greedy, and therefore has no seed."""
    plain = _generate(random_http, details=True, max_new_tokens=12)
    assert (
        _generate(random_http, details=True, max_new_tokens=12, **neutral)["generated_text"] == plain["generated_text"]
    )
    assert _generate(random_http, details=True, max_new_tokens=2, **neutral)["details"]["seed"] is None
    drawn = _generate(random_http, details=True, max_new_tokens=2, do_sample=True, **neutral)
    assert drawn["details"]["seed"] is not None


def test_the_best_of_several_comes_first(random_http: httpx.Client) -> None:
    details = _generate(random_http, do_sample=True, best_of=3, max_new_tokens=6, details=True)["details"]
    runs = [details, *details["best_of_sequences"]]
    means = [sum(row["logprob"] for row in run["tokens"]) / len(run["tokens"]) for run in runs]
    assert len(runs) == 3 and means == sorted(means, reverse=True)


@pytest.mark.parametrize("constraint", [None, {"regex": "[a-z]{4}"}])
def test_each_of_several_is_replayed_by_its_own_seed(random_http: httpx.Client, constraint: Any) -> None:
    fields = {"do_sample": True, "max_new_tokens": 6, "details": True, "constraint": constraint}
    best = _generate(random_http, best_of=3, **fields)
    runs = [best["details"] | {"generated_text": best["generated_text"]}, *best["details"]["best_of_sequences"]]
    assert len({run["seed"] for run in runs}) == 3
    for run in runs:
        assert _generate(random_http, seed=run["seed"], **fields)["generated_text"] == run["generated_text"]


def test_an_output_without_a_token_has_last_words_too(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"grammar": {"type": "regex", "value": ""}, "details": True}
    assert _generate(http, **fields)["details"]["tokens"] == []
    (event,) = _events(http, **fields)
    assert event["token"]["special"] and event["token"]["id"] in tokenizer().eos_token_ids
    assert event["generated_text"] == "" and event["details"]["generated_tokens"] == 0


async def _streamed(events: list[list[Event]], **parameters: Any) -> list[dict[str, Any]]:
    """Return the stream of a steered request with these events."""
    model = fake_model(lambda request: events)
    request = Request("r", (97, 98), SamplingParams(max_tokens=9, logprobs=0), controller=object())
    serving = await served_by(model)
    parts = [SubRequest(0, request, text="ab")]
    generation = Generation(model, model.name, serving.story, serving.ticket, serving.exit_stack, parts)
    answer = TgiResponse(generation, plan_of(Parameters(details=True, **parameters), is_stream=True), "ab")
    told: list[bytes] = []

    async def send(message: Any) -> None:
        told.append(message["body"])

    with contextlib.closing(SseWriter(send, 5.0)) as writer:
        await answer.stream(writer)
    return [json.loads(line[6:]) for line in b"".join(told).splitlines() if line]


async def test_what_may_be_taken_back_is_not_told_and_logs_are() -> None:
    def token(number: int) -> TokenEvent:
        return TokenEvent("r", 0, number, chr(number), Logprob(number, -1.0))

    events: list[list[Event]] = [
        [PromptEvent("r", 0, (97, 98)), *map(token, b"xyz"), Log("r", 0, "one ")],
        [Rewind("r", 0, 2, 2), token(ord("!")), Log("r", 0, "two")],
        [Finished("r", 0, FinishReason.CONTROLLER)],
    ]
    told = await _streamed(events)
    assert [event["token"]["text"] for event in told] == ["x", "!"]
    assert told[-1]["generated_text"] == "x!" and told[-1]["details"]["logs"] == "one two"


def test_headers_tell_what_it_took(http: httpx.Client) -> None:
    response = http.post("/generate", json={"inputs": "Say it:"})
    headers = response.headers
    assert headers["x-compute-characters"] == "7" and int(headers["x-prompt-tokens"]) > 0
    total = int(headers["x-total-time"])
    assert int(headers["x-validation-time"]) <= total and int(headers["x-queue-time"]) <= total
    assert float(headers["x-compute-time"]) > 0 and int(headers["x-generated-tokens"]) > 1


@pytest.mark.parametrize("grammar", [{"type": "regex", "value": "[0-9]{3}"}, {"type": "json", "value": {"const": 7}}])
def test_a_grammar_rules_the_text(random_http: httpx.Client, grammar: dict[str, Any]) -> None:
    text = _generate(random_http, grammar=grammar, max_new_tokens=40)["generated_text"]
    assert text.isdigit()
    events = _events(random_http, grammar=grammar, max_new_tokens=40)
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == text


PROPERTIES: dict[str, Any] = {"properties": {"a": {"const": 7}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json", "value": PROPERTIES},
        {"type": "json", "value": json.dumps(PROPERTIES)},
        {"type": "json_object", "value": PROPERTIES},
        {"type": "json_schema", "value": {"name": "x", "schema": PROPERTIES}},
    ],
)
def test_properties_are_those_of_an_object(random_http: httpx.Client, form: dict[str, Any]) -> None:
    """The properties are enforced even if the schema does not require an object, and also in chats."""
    assert _generate(random_http, grammar=form, max_new_tokens=20)["generated_text"].startswith('{"a": 7')
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form, "max_tokens": 20}
    chat = random_http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert chat.startswith('{"a": 7')


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 0}, "temperature is 0.0; must be more than 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -5}, "top_k is -5"),
        ({"top_k": -1}, "top_k is -1; must be at least 1, or 0 to turn it off"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5; must be between -2 and 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
        ({"best_of": 2, "top_p": 1.0, "typical_p": 1.0, "top_k": 0, "min_p": 0.0}, "needs sampling"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 100_000}, "max_tokens of 100000"),
        ({"best_of": 2}, "needs sampling"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "cannot be combined with a seed"),
        ({"best_of": 99, "do_sample": True}, "best_of is 99"),
        ({"seed": -1}, "seed is -1"),
        ({"truncate": 0}, "truncate is 0; must be between 1 and 511"),
        ({"truncate": 512}, "truncate is 512"),
        ({"top_n_tokens": 1000}, "top_n_tokens is 1000"),
        ({"stop": ["x"] * 1000}, "stop has 1000 strings"),
        ({"grammar": {"type": "regex", "value": "("}}, "regex"),
        ({"grammar": {"type": "yaml", "value": ""}}, "grammar.type"),
        ({"watermark": "yes"}, "watermark"),
    ],
)
def test_bad_parameters_are_refused_by_name(http: httpx.Client, parameters: dict[str, Any], message: str) -> None:
    for path in ("/generate", "/"):
        response = http.post(path, json={"inputs": "x", "parameters": parameters})
        body = response.json()
        assert response.status_code == 422 and body["error_type"] == "validation", body
        assert body["error"].startswith("Input validation error: ") and message in body["error"]


def test_every_error_is_json_of_the_native_shape(http: httpx.Client) -> None:
    cases = [
        (http.post("/generate", content=b"{", headers={"content-type": "application/json"}), 400),
        (http.post("/generate", json={"parameters": {}}), 422),
        (http.post("/generate", json={"inputs": ""}), 422),
        (http.post("/generate", json={"inputs": 5}), 422),
        (http.post("/generate", json={"inputs": "x", "model": "nobody"}), 404),
        (http.post("/generate", json={"inputs": "x", "parameters": {"adapter_id": "nobody"}}), 404),
        (http.post("/generate", content=b"x" * (5 << 20)), 413),
        (http.post("/invocations", json={"what": 1}), 422),
        (http.post("/generate_stream", json={"inputs": "x", "parameters": {"decoder_input_details": True}}), 422),
    ]
    for response, status in cases:
        assert response.status_code == status, response.text
        assert isinstance(response.json()["error"], str) and response.json()["error_type"] == "validation"


def test_tokenize_tells_places(http: httpx.Client) -> None:
    text = "Héllo there"
    rows = http.post("/tokenize", json={"inputs": text, "add_special_tokens": False}).json()
    assert [row["id"] for row in rows] == tokenizer().encode(text, add_special_tokens=False)
    assert all(row["text"] == text[row["start"] : row["stop"]] for row in rows if row["start"] < row["stop"])
    chat = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert "Hi" in chat["templated_text"] and len(chat["tokenize_response"]) > 1


def test_tokenize_answers_in_the_shape_that_was_asked_for(http: httpx.Client) -> None:
    text = "Héllo there"
    ids = tokenizer().encode(text)
    of_vllm = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert (of_vllm["count"], of_vllm["tokens"]) == (len(ids), ids) and of_vllm["max_model_len"] > 0
    assert of_vllm["token_strs"] == [tokenizer().token_text(token) for token in ids]
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert "Hi" in tokenizer().decode(chat["tokens"])
    bare = tokenizer().encode(text, add_special_tokens=False)
    assert http.post("/tokenize", json={"content": text}).json() == {"tokens": bare}
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    parts = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
    assert b"".join(parts) == text.encode()


def test_detokenize_gives_the_text_back(http: httpx.Client) -> None:
    ids = tokenizer().encode("Héllo there", add_special_tokens=False)
    answer = http.post("/detokenize", json={"tokens": ids}).json()
    assert answer["prompt"] == answer["content"] == "Héllo there"
    for wrong in ([1 << 40], [-1], ["x"], "x"):
        assert http.post("/detokenize", json={"tokens": wrong}).status_code == 422
    assert http.post("/tokenize", json={"prompt": "a", "content": "b"}).status_code == 422


def test_info_tells_the_limits(http: httpx.Client) -> None:
    info = http.get("/info").json()
    assert info["model_id"] == "scripted" and info["max_total_tokens"] == info["max_input_tokens"] + 1
    assert http.get("/info", params={"model": "nobody"}).status_code == 404


def test_info_tells_the_knobs_and_prompts_keep_to_them() -> None:
    config = EngineConfig(
        max_batch_prefill_tokens=64, max_num_seqs=3, max_input_tokens=20, max_total_tokens=40, max_waiting_tokens=5
    )
    with local_client(scripted_model(config=config), HttpSettings(max_requests=7)) as client:
        info = client.get("/info").json()
        body = {"inputs": "q;" * 15, "parameters": {"max_new_tokens": 3}}
        refused = client.post("/generate", json=body)
        taken = client.post("/generate", json=body | {"parameters": {"max_new_tokens": 3, "truncate": 20}})
    assert taken.status_code == 200, taken.text
    assert refused.status_code == 422 and "max_input_tokens is 20" in refused.json()["error"]
    wanted = {
        "max_concurrent_requests": 7,
        "max_batch_prefill_tokens": 64,
        "max_batch_total_tokens": 4096,
        "max_batch_size": 3,
        "max_input_tokens": 20,
        "max_total_tokens": 40,
        "max_waiting_tokens": 5,
        "waiting_served_ratio": 1.2,
    }
    assert {name: info[name] for name in wanted} == wanted


def test_invocations_take_any_body(http: httpx.Client) -> None:
    assert http.post("/invocations", json={"inputs": "Say it:"}).json()[0]["generated_text"].endswith(REPLY)
    chat = http.post("/invocations", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}).json()
    assert chat["object"] == "chat.completion"
    assert http.post("/invocations", json={"prompt": "Hi", "max_tokens": 3}).json()["object"] == "text_completion"


def test_a_failure_while_streaming_is_an_event() -> None:
    is_read = threading.Event()
    model = overdue_model(is_read, num_prompt=1)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 400}}
    with (
        served(model, HttpSettings(request_timeout=2 * PATIENCE)) as url,
        httpx.stream("POST", url + "/generate_stream", json=body) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines)
        is_read.set()
        *_, last = [json.loads(line.removeprefix("data:")) for line in lines if line]
    assert last["error_type"] == "incomplete_generation" and last["error"]
