"""Tests of small parts of the server: log-probability lists, metrics, pages, logs and cross-origin requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bridle import errors
from bridle.deprecated_names import LOG_FIELDS
from bridle.engine.statistics import HELP, EngineStatistics
from bridle.errors import BridleError
from bridle.http import HttpSettings
from bridle.http.errors import describe_validation, error_body, error_response, status_of
from bridle.http.openai.logprobs import CompletionLogprobs
from bridle.logs import configure_logs
from bridle.outputs import Logprob, Usage
from bridle.serving.lifecycle.request_record import RequestRecord
from tests.http.harness import local_client, saying, scripted_model, tokenizer
from tests.serving.fakes import ByteTokenizer, fake_model

# -- log-probabilities --------------------------------------------------------------------------------------


@given(st.text(max_size=12), st.integers(0, 12))
def test_offsets_point_at_the_character_of_each_token(text: str, cut: int) -> None:
    tokens = list(text.encode())
    shaper = CompletionLogprobs(ByteTokenizer())  # type: ignore[arg-type]
    entries = [Logprob(token, -1.0) for token in tokens]
    first = shaper.shape(text, tokens[:cut], entries[:cut], False)
    second = shaper.shape("", tokens[cut:], entries[cut:], False)
    expected = [position for position, char in enumerate(text) for _ in char.encode()]
    assert first["text_offset"] + second["text_offset"] == expected


def test_special_tokens_have_a_width_only_where_they_show() -> None:
    text = tokenizer()
    special = min(text.special_token_ids)
    tokens = [special, *text.encode("ab")]
    entries = [Logprob(token, float("-inf")) for token in tokens]
    hidden = CompletionLogprobs(text).shape("ab", tokens, entries, False)
    assert hidden["text_offset"] == [0, 0, 1]
    assert hidden["token_logprobs"] == [-9999.0] * 3
    name = text.token_text(special)
    shown = CompletionLogprobs(text).shape(name + "ab", tokens, entries, False)
    assert shown["text_offset"] == [0, len(name), len(name) + 1]


# -- errors -------------------------------------------------------------------------------------------------


def all_errors(base: type[BridleError] = BridleError) -> Iterator[type[BridleError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from all_errors(kind)


@pytest.mark.parametrize("kind", list(all_errors()))
def test_every_error_has_a_status_and_a_body(kind: type[BridleError]) -> None:
    error = kind("why")
    status, name = status_of(error)
    assert 400 <= status < 600
    shape = {"message": "why", "type": name, "param": getattr(error, "param", None), "code": kind.code}
    assert error_body(error)["error"] == shape


def test_errors_can_always_be_written() -> None:
    answer = error_response(BridleError("\ud800" + "x" * 5_000))
    message = json.loads(answer.body)["error"]["message"]
    assert message.startswith("?xxx")
    assert len(message) < 4_100


def test_validation_errors_are_sentences() -> None:
    long = {"type": "int_type", "loc": ("body", "a", 0), "msg": "Input should be x", "input": "y" * 200}
    described = describe_validation([long])
    assert str(described) == "a.0 is '" + "y" * 79 + "...; input should be x"
    assert described.param == "a.0"
    assert str(describe_validation([])) == "the request body is None; invalid request"


# -- models, page, metrics ----------------------------------------------------------------------------------


def test_aliases_are_listed_and_serve() -> None:
    with local_client(fake_model(name="org/model"), aliases=["m"]) as client:
        rows = client.get("/v1/models").json()["data"]
        assert [(row["id"], row["root"]) for row in rows] == [("org/model", "org/model"), ("m", "org/model")]
        assert client.get("/v1/models/org/model").json()["max_model_len"] == 256
        assert client.post("/v1/completions", json={"prompt": "a", "model": "m"}).json()["model"] == "org/model"


def test_health_follows_the_engine() -> None:
    model = fake_model()
    with local_client(model) as client:
        assert client.get("/health").json() == {"status": "ok"}
        model.client.is_healthy = False  # type: ignore[misc]
        assert (client.get("/health").status_code, client.get("/health/ready").status_code) == (503, 503)
        assert client.get("/health/live").status_code == 200


class Links(HTMLParser):
    """Every URL that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "action") and value:
                (self.linked if tag == "a" else self.loaded).append(value)


def test_the_page_is_self_contained_and_names_nothing() -> None:
    with local_client(fake_model(name="<script>alert(1)</script>'")) as client:
        answer = client.get("/", headers={"accept": "text/html"})
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        links = Links()
        links.feed(answer.text)
        assert all(path.startswith("playground/") for path in links.loaded)
        assert "<script>alert" not in answer.text
        assert not re.search(r"https?://(?!testserver)", answer.text)
        for path in [*links.linked, *links.loaded]:
            assert client.get("/" + path).status_code == 200


def test_the_openapi_document_describes_the_bodies() -> None:
    with local_client(fake_model()) as client:
        document = client.get("/openapi.json").json()
        prompt = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
        assert {"type": "string"} in prompt["anyOf"]
        assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"}
        posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
        assert [path for path, post in posts.items() if "requestBody" not in post] == [
            "/v1/batches/{batch_id}/cancel",
            "/v1/policies/reload",
            "/v1/websocket_tickets",
            "/v1/caches/{cache_id}/prefetch",
        ]


def test_the_openapi_document_describes_errors_as_they_are() -> None:
    with local_client(fake_model()) as client:
        document = client.get("/openapi.json").json()
        assert "HTTPValidationError" not in str(document)
        for path in ("/v1/completions", "/v1/messages", "/generate", "/invocations"):
            content = document["paths"][path]["post"]["responses"]["4XX"]["content"]
            for answer in (client.post(path, json={"max_tokens": -1}), client.delete(path)):
                jsonschema.validate(answer.json(), content["application/json"]["schema"])


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_metrics_also_have_the_names_of_other_servers() -> None:
    with local_client(scripted_model(next_token=saying("Hi."))) as client:
        client.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 9}})
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "model": "nobody"})
        client.get("/v1/models")
        lines = client.get("/metrics").text.splitlines()
    assert {
        "tgi_request_count 2.0",
        "tgi_request_success 1.0",
        'tgi_request_failure{err="validation"} 1.0',
        "tgi_queue_size 0.0",
        "tgi_request_max_new_tokens_sum 9.0",
        "tgi_request_queue_duration_count 1.0",
    } <= set(lines)
    steps = {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("tgi_batch")}
    num_steps = steps['tgi_batch_inference_count{method="decode"}']
    assert num_steps == steps['tgi_batch_inference_success{method="decode"}'] >= 3
    assert steps['tgi_batch_inference_duration_count{method="decode"}'] == num_steps
    assert steps['tgi_batch_forward_duration_sum{method="decode"}'] > 0
    label = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="bridle",gen_ai_request_model="scripted"'
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{label}}} 1.0" in lines


def test_metrics_count_calls_tokens_and_the_engine() -> None:
    model = scripted_model(next_token=saying("Hello."))
    with local_client(model) as client:
        for is_stream in (False, True):
            client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 50, "stream": is_stream})
        client.post("/v1/completions", json={"prompt": "Say", "model": "x" * 50})
        client.get("/v1/nope")
        found = samples(client.get("/metrics").text)
    num_tokens = len(tokenizer().encode("Hello.")) + 1
    label = (("model", "scripted"),)
    tokens = {kind: found["bridle_http_tokens_total", (("kind", kind), *label)] for kind in ("prompt", "completion")}
    assert tokens == {"prompt": 6, "completion": 2 * num_tokens}
    route = (*label, ("route", "/v1/completions"), ("status", "200"))
    assert found["bridle_http_requests_total", route] == 2
    assert found["bridle_http_choices_total", (*label, ("reason", "stop"))] == 2
    assert found["bridle_http_request_seconds_count", label] == 2
    assert found["bridle_http_first_token_seconds_count", label] == 2
    assert found["bridle_http_in_flight", ()] == 0
    assert found["bridle_engine_requests_total", label] == 2
    assert found["bridle_engine_sampled_tokens_total", label] == 2 * num_tokens
    assert found["bridle_engine_finished_total", (*label, ("reason", "stop"))] == 2
    assert found["bridle_engine_up", label] == 1
    assert found["bridle_engine_kv_usage", label] == 0
    labels = {value for (name, pairs) in found for key, value in pairs if key in ("route", "model")}
    assert labels <= {"scripted", "", "/v1/completions", "other", "/v1/models"}


def test_each_metric_has_a_help_text_that_says_more_than_its_name_and_names_its_unit() -> None:
    with local_client(scripted_model(next_token=saying("Hello."))) as client:
        client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 9})
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    helps = {family.name: family.documentation for family in families}
    assert {f"bridle_engine_{name.removeprefix('num_')}" for name in HELP} <= helps.keys()
    units = ("seconds", "bytes", "blocks", "tokens", "adapters", "states")
    for name, text in helps.items():
        words = name.split("_")
        derived = " ".join(words[2:])
        assert re.fullmatch(r"[A-Z0-9].*[.]", text), (name, text)
        assert text.lower().removeprefix("the engine's ").rstrip(".") != derived, (name, text)
        assert words[-1] not in units or words[-1] in text.lower(), (name, text)
    fields_of_metrics = {each.name for each in fields(EngineStatistics)} - {"policies", "tenant_blocks"}
    assert fields_of_metrics | {"kv_usage"} == HELP.keys()


def test_cross_origin_calls_need_the_setting() -> None:
    headers = {"origin": "http://page.example", "access-control-request-method": "POST"}
    with local_client(fake_model()) as client:
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=headers).headers
    with local_client(fake_model(), HttpSettings(cors_origins=("http://page.example",))) as client:
        answer = client.options("/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        other = client.get("/v1/models", headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


# -- logs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Captured standard error. The logging settings are restored after the test."""
    names = ("", "bridle", "uvicorn")
    levels = [logging.getLogger(name).level for name in names]
    handlers, config = logging.getLogger().handlers[:], structlog.get_config()
    yield lambda: capsys.readouterr().err
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)
    logging.getLogger().handlers[:] = handlers
    structlog.configure(**config)


def test_one_line_tells_the_story_of_a_request(log: Callable[[], str]) -> None:
    configure_logs("json", "info")
    with local_client(scripted_model(next_token=saying("Hello."))) as client:
        answer = client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 50})
        client.get("/health")
        client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 100_000})
    stories = [json.loads(line) for line in log().splitlines() if '"request"' in line]
    told, refused = stories
    assert told["id"] == answer.headers["x-request-id"]
    assert answer.json()["id"] == "cmpl-" + told["id"]
    expected = {"route": "POST /v1/completions", "status": 200, "model": "scripted", "finish": "stop"}
    assert expected.items() <= told.items()
    assert {"prompt": 3, "cached": 0, "completion": len(tokenizer().encode("Hello.")) + 1}.items() <= told.items()
    assert 0 <= told["first_token_ms"] <= told["ms"]
    assert refused["status"] == 400
    assert refused["error"].startswith(
        "context_length_exceeded: This model's maximum context length is 512 tokens; the prompt has 3"
    )


def test_a_line_in_json_also_has_the_old_names_of_fields(log: Callable[[], str]) -> None:
    story = RequestRecord(id="r", opening=0.25, held=0.5, usage=Usage(spared_tokens=7))
    for kind in ("json", "full"):
        configure_logs(kind, "info")  # type: ignore[arg-type]
        structlog.get_logger("bridle.http").info("request", route="/x", **story.fields())
    in_json, in_full = log().splitlines()
    line = json.loads(in_json)
    assert (line["controller_start_ms"], line["controller_wait_ms"], line["best_of_saved"]) == (250.0, 500.0, 7)
    assert all(line[old] == line[new] for old, new in LOG_FIELDS.items())
    assert "best_of_saved=7" in in_full and not any(f"{old}=" in in_full for old in LOG_FIELDS)


@pytest.mark.parametrize("log_format", ["console", "full"])
def test_a_terminal_shows_five_fields_of_a_request(log: Callable[[], str], log_format: Any) -> None:
    configure_logs(log_format, "info")
    with local_client(scripted_model(next_token=saying("Hello."))) as client:
        client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 50})
        client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 100_000})
    answered, refused = [line for line in log().splitlines() if "route=" in line]
    fields, others = (re.findall(r" (\w+)=", re.sub(r"'[^']*'", "", line)) for line in (answered, refused))
    if log_format == "full":
        assert {"id", "user", "model", "cached", "first_token_ms", "ms", "finish"} <= set(fields)
    else:
        assert fields == ["route", "status", "model", "tokens", "seconds"]
        assert "route='POST /v1/completions' status=200 model=scripted" in answered
        assert f"tokens=3+{len(tokenizer().encode('Hello.')) + 1} " in answered
        assert others[0:2] == ["route", "status"] and others[-1] == "error" and "context_length_exceeded" in refused


def test_a_bug_leaves_its_traceback_in_the_log(log: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logs("json", "info")

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("bridle.serving.lifecycle.request_lifecycle.RequestLifecycle.acquire_model", broken)
    with local_client(fake_model()) as client:
        answer = client.post("/v1/completions", json={"prompt": "a"})
    (line,) = [json.loads(line) for line in log().splitlines() if "secret detail" in line]
    assert line["id"] == answer.headers["x-request-id"]
    assert "Traceback" in line["exception"]


def test_a_request_that_is_cut_at_the_end_is_no_failure(log: Callable[[], str]) -> None:
    configure_logs("json", "info")
    for error in (asyncio.CancelledError(), ValueError("a failure")):
        logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
    (told,) = log().splitlines()
    assert "a failure" in told


def test_a_traceback_on_a_terminal_shows_no_texts(log: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logs("console", "info")

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("bridle.serving.lifecycle.request_lifecycle.RequestLifecycle.acquire_model", broken)
    with local_client(fake_model()) as client:
        client.post("/v1/completions", json={"prompt": "a word of the client"})
    told = log()
    assert "Traceback" in told and "secret detail" in told and "a word of the client" not in told


@pytest.mark.parametrize("log_format", ["console", "auto"])
def test_other_formats_and_other_libraries(log: Callable[[], str], log_format: Any) -> None:
    configure_logs(log_format, "warning")
    logging.getLogger("some.library").warning("hello %s", "you")
    structlog.get_logger("bridle.http").info("too quiet")
    written = log()
    assert "hello you" in written
    assert "too quiet" not in written
