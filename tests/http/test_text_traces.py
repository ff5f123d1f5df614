"""Tests of traces over HTTP: each API accepts a request for a trace. Only the user of the request gets the trace, and
the trace's size is limited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from bridle.errors import InvalidRequest, UnknownTrace
from bridle.http.middleware.request_context import GENERATING_ROUTES
from bridle.http.settings import HttpSettings
from bridle.serving.tracing.trace_store import BOUNDS, TRACE_EVENTS, TraceStore, wish_of
from bridle.traces import LogRecord, Trace, TraceHeader, decode_record, encode_trace, read
from bridle.traces.replay_text import rebuild
from tests.http.harness import calls, local_client, saying, scripted_model
from tests.serving.fakes import check_counts

REPLY = "good day"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TGI: dict[str, Any] = {"inputs": "hi", "parameters": {"max_new_tokens": 40}}
SGLANG: dict[str, Any] = {"text": "hi", "sampling_params": {"max_new_tokens": 40}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 40},
    "/v1/chat/completions": {**CHAT, "max_tokens": 40},
    "/v1/responses": {"input": "hi", "max_output_tokens": 40},
    "/v1/responses/compact": {"model": "scripted", "input": "hi", "max_output_tokens": 40},
    "/v1/messages": {**CHAT, "model": "scripted", "max_tokens": 40},
    "/generate": TGI,
    "/generate_stream": TGI,
    "/": TGI,
    "/invocations": TGI,
    "/api/chat": {**CHAT, "stream": False, "options": {"num_predict": 40}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 40}},
    "/v1/run": {"controller": "none", "controller_arg": "hi", "max_tokens": 40},
}
#: Those, and the other forms that some of them take.
BODIES = [*ROUTES.items(), ("/generate", SGLANG), ("/invocations", ROUTES["/v1/chat/completions"])]
#: Routes whose answers do not have the text in one piece.
IN_PIECES = ("/v1/run", "/generate_stream", "/v1/responses/compact")
#: Routes that take a body and generate no text.
OTHERS = {
    "/api/blobs/{digest}",
    "/api/copy",
    "/api/create",
    "/api/embed",
    "/api/embeddings",
    "/api/pull",
    "/api/push",
    "/api/show",
    "/chat_tokenize",
    "/classify",
    "/detokenize",
    "/embed",
    "/predict",
    "/rerank",
    "/score",
    "/similarity",
    "/tokenize",
    "/v1/adapters",
    "/v1/batches",
    "/v1/batches/{batch_id}/cancel",
    "/v1/caches",
    "/v1/caches/{cache_id}/prefetch",
    "/v1/classify",
    "/v1/control_vectors",
    "/v1/controllers",
    "/v1/controllers/tags",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items",
    "/v1/decide",
    "/v1/embeddings",
    "/v1/files",
    "/v1/load_lora_adapter",
    "/v1/messages/count_tokens",
    "/v1/models/load",
    "/v1/models/unload",
    "/v1/pause",
    "/v1/policies/reload",
    "/v1/rerank",
    "/v1/resume",
    "/v1/score",
    "/v1/tool_results/{call_id}",
    "/v1/tools/call",
    "/v1/unload_lora_adapter",
    "/v1/websocket_tickets",
    "/v2/rerank",
}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(scripted_model(next_token=saying(REPLY))) as made:
        yield made


def with_field(path: str, value: object, body: dict[str, Any] | None = None) -> dict[str, Any]:
    made = json.loads(json.dumps(body or ROUTES[path]))
    made.get("parameters", made)["trace"] = value
    return dict(made)


def test_no_route_is_forgotten(client: TestClient) -> None:
    assert ROUTES.keys() == GENERATING_ROUTES
    taking = {path for method, path in calls(cast("FastAPI", client.app)) if method == "POST"}
    assert taking - GENERATING_ROUTES == OTHERS


def traces_of(client: TestClient, request_id: str, tmp_path: Path) -> list[Trace]:
    answer = client.get(f"/v1/traces/{request_id}")
    assert answer.status_code == 200, answer.text
    path = tmp_path / "trace.jsonl"
    path.write_bytes(answer.content)
    return list(read(path))


@pytest.mark.few(5)
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_api_takes_the_wish(client: TestClient, path: str, body: dict[str, Any], tmp_path: Path) -> None:
    plain = client.post(path, json=body)
    assert client.get(f"/v1/traces/{plain.headers['x-request-id']}").status_code == 404
    asked = (
        client.post(path, json=body, headers={"X-Bridle-Trace": "1"}),
        client.post(path, json=with_field(path, True, body)),
    )
    for answer in asked:
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-bridle-trace"] == "kept"
        (trace,) = traces_of(client, answer.headers["x-request-id"], tmp_path)
        (output,) = rebuild(trace)
        assert output.text == REPLY
        assert output.end is not None
        assert output.end.reason == "stop"
        assert REPLY in answer.text or path in IN_PIECES
        assert trace.header.model == "scripted"


def test_the_field_counts_where_both_say_something(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=with_field("/v1/completions", False), headers={"X-Bridle-Trace": "1"})
    assert client.get(f"/v1/traces/{answer.headers['x-request-id']}").status_code == 404


def test_several_choices_of_several_prompts_are_all_there(client: TestClient, tmp_path: Path) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 5, "temperature": 1.0, "trace": True}
    answer = client.post("/v1/completions", json=body)
    found = traces_of(client, answer.headers["x-request-id"], tmp_path)
    texts = [output.text for trace in found for output in rebuild(trace)]
    assert texts == [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_records_come_with_the_stream(client: TestClient, path: str, tmp_path: Path) -> None:
    body = {**with_field(path, "events"), "stream": True}
    answer = client.post(path, json=body)
    told = []
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                told += choice.get("trace", [])
    (trace,) = traces_of(client, answer.headers["x-request-id"], tmp_path)
    assert [decode_record(json.dumps(record).encode()) for record in told] == trace.records


@pytest.mark.parametrize("is_stream", [False, True])
def test_records_come_in_the_form_of_sglang(client: TestClient, is_stream: bool, tmp_path: Path) -> None:
    answer = client.post("/generate", json={**SGLANG, "trace": "events", "stream": is_stream})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("{", "data: {"))]
    told = [record for line in lines for record in json.loads(line)["meta_info"].get("trace", ())]
    (trace,) = traces_of(client, answer.headers["x-request-id"], tmp_path)
    assert [decode_record(json.dumps(record).encode()) for record in told] == trace.records


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("has_details", [False, True])
def test_records_come_in_the_native_form(client: TestClient, path: str, has_details: bool, tmp_path: Path) -> None:
    parameters = {**TGI["parameters"], "trace": "events", "details": has_details}
    answer = client.post(path, json={**TGI, "parameters": parameters})
    lines = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith(("{", "data:"))]
    events = [json.loads(line) for line in lines]
    told = [record for event in events for record in event.get("trace") or (event["details"] or {}).get("trace", ())]
    (trace,) = traces_of(client, answer.headers["x-request-id"], tmp_path)
    assert [decode_record(json.dumps(record).encode()) for record in told] == trace.records


def test_records_come_with_a_run(client: TestClient, tmp_path: Path) -> None:
    answer = client.post("/v1/run", json=with_field("/v1/run", "events"))
    told = []
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for fork in json.loads(line[6:]).get("forks", ()):
                told += fork.get("trace", [])
    (trace,) = traces_of(client, answer.headers["x-request-id"], tmp_path)
    assert [decode_record(json.dumps(record).encode()) for record in told] == trace.records


def test_what_is_no_wish_is_refused(client: TestClient) -> None:
    for answer in (
        client.post("/v1/completions", json=with_field("/v1/completions", "maybe")),
        client.post("/v1/completions", json=ROUTES["/v1/completions"], headers={"X-Bridle-Trace": "maybe"}),
    ):
        assert answer.status_code == 400
        assert "trace is 'maybe'" in answer.text


def numbers_in(text: str) -> dict[str, float]:
    """Return the values of the trace metrics, by name and labels."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if "trace" in line and not line.startswith("#")]
    return {name.partition("{model")[0]: float(value) for name, value in lines}


def test_traces_are_counted(tmp_path: Path) -> None:
    settings = HttpSettings(trace_folder=tmp_path / "traces", trace_share=1.0)
    with local_client(scripted_model(), settings) as client:
        before = numbers_in(client.get("/metrics").text)
        assert set(before.values()) == {0.0}
        for wish in (True, False):
            client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "trace": wish})
        client.app.state.http.traces.close()  # type: ignore[attr-defined]  # all is written
        now = numbers_in(client.get("/metrics").text)
    counted = {event: now[f'bridle_traces_total{{event="{event}"}}'] for event in (*TRACE_EVENTS, "dropped")}
    assert counted == {"asked": 1, "chosen": 2, "cut": 0, "written": 2, "failed": 0, "removed": 0, "dropped": 0}
    assert now["bridle_traces_kept"] == 1
    assert now["bridle_traces_kept_bytes"] > 0
    assert now["bridle_engine_traced"] == now["bridle_engine_cut_trace_records_total"] == 0
    assert now["bridle_engine_trace_records_total"] >= 2 * (1 + 3)  # without the ends


def test_an_unknown_trace_is_a_404(client: TestClient) -> None:
    answer = client.get("/v1/traces/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "trace_not_found"


def test_a_share_of_all_goes_to_the_operators_folder(tmp_path: Path) -> None:
    settings = HttpSettings(trace_folder=tmp_path / "traces", trace_share=1.0)
    with local_client(scripted_model(), settings) as client:
        answer = client.post("/v1/completions", json=ROUTES["/v1/completions"])
        request_id = answer.headers["x-request-id"]
        assert client.get(f"/v1/traces/{request_id}").status_code == 404  # its client did not ask
        client.app.state.http.traces.close()  # type: ignore[attr-defined]
    (trace,) = read(tmp_path / "traces" / f"{request_id}.jsonl")
    assert rebuild(trace)[0].text == answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"trace_share": 2.0, "trace_folder": Path("x")}, "trace_share is 2.0"),
        ({"trace_share": 0.5}, "without a trace_f"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        HttpSettings(**settings)


# -- the book ------------------------------------------------------------------------------------------------


def trace_of(size: int) -> Trace:
    return Trace(TraceHeader("a"), [LogRecord(0, 1, "x" * size)])


def find(book: TraceStore, name: str, user: str) -> bytes:
    return asyncio.run(book.find(name, user))


def test_others_do_not_get_it() -> None:
    book = TraceStore()
    book.keep("one", "ann", [trace_of(3)], is_wanted=True)
    assert find(book, "one", "ann") == encode_trace(trace_of(3))
    with pytest.raises(UnknownTrace):
        find(book, "one", "bob")
    book.close()


def test_traces_go_when_they_are_old() -> None:
    now = 0.0
    book = TraceStore(bounds=replace(BOUNDS, seconds=10.0), clock=lambda: now)
    book.keep("one", "ann", [trace_of(3)], is_wanted=True)
    now = 9.0
    find(book, "one", "ann")
    now = 11.0
    with pytest.raises(UnknownTrace):
        find(book, "one", "ann")
    book.close()


def test_nobody_replaces_the_trace_of_another_by_its_name() -> None:
    book = TraceStore()
    book.keep("one", "ann", [trace_of(3)], is_wanted=True)
    book.keep("one", "bob", [trace_of(4)], is_wanted=True)
    assert [find(book, "one", user) for user in ("ann", "bob")] == [
        encode_trace(trace_of(3)),
        encode_trace(trace_of(4)),
    ]
    book.close()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3000)), max_size=12))
def test_the_book_is_bounded_by_what_traces_take(kept: list[tuple[str, int]]) -> None:
    book = TraceStore(bounds=replace(BOUNDS, max_bytes=9_000, max_bytes_of_user=6_000))
    for number, (user, size) in enumerate(kept):
        book.keep(str(number), user, [trace_of(size)], is_wanted=True)
    book.close()
    check_counts(book.texts)
    number, (user, size) = len(kept) - 1, kept[-1] if kept else ("a", 0)
    if kept:
        text = find(book, str(number), user)
        assert text == encode_trace(trace_of(size)) and len(text) <= book.texts.num_bytes


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    book = TraceStore(tmp_path, 1.0, max_folder_bytes=5_000)
    for number in range(8):
        book.keep(f"r{number}", "ann", [trace_of(1_000)], is_wanted=False)
    book.close()
    files = list(tmp_path.glob("*.jsonl"))
    assert 1 <= len(files) < 8
    assert sum(file.stat().st_size for file in files) <= 5_000
    assert len(book.texts) == 0


@given(st.floats(0, 1))
def test_the_share_is_one_of_ids(share: float) -> None:
    book = TraceStore(Path("unused"), share)
    chosen = sum(book.is_chosen(f"request-{number}") for number in range(400))
    assert abs(chosen / 400 - share) < 0.15
    assert TraceStore(None, 0.0).is_chosen("request-1") is False


@pytest.mark.parametrize(
    ("headers", "field", "wish"),
    [
        ({}, None, "no"),
        ({"x-bridle-trace": "1"}, None, "kept"),
        ({"x-bridle-trace": "Events"}, None, "told"),
        ({"x-bridle-trace": "off"}, None, "no"),
        ({"x-bridle-trace": "on"}, False, "no"),
        ({}, "events", "told"),
        ({}, True, "kept"),
    ],
)
def test_header_and_field_say_which_trace_is_wanted(
    headers: dict[str, str], field: bool | str | None, wish: str
) -> None:
    assert wish_of(headers, field) == wish
