"""Tests of Ollama's API with a scripted model: formats, streams, options, errors, and pulls of listed models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from bridle.config import ModelConfig
from bridle.errors import UnsupportedModel
from bridle.http import HttpSettings, create_app
from bridle.http.ollama import manage
from bridle.http.ollama.options import with_options
from bridle.load_progress import Report
from bridle.model.library import find_entry, store
from bridle.serving import LoadedModel, ModelRegistry, load_model
from bridle.serving.models.catalog import ModelCatalog
from bridle.serving.models.model_loader import ModelManager
from bridle.serving.models.model_memory import Needs
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import NAME, local_client, saying, scripted_model, served
from tests.sources import ROOT
from tests.waiting import until

REPLY = "good day"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(scripted_model(next_token=saying(REPLY), embedding_size=8)) as made:
        yield made


def rows_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def check_ending(row: dict[str, Any]) -> None:
    assert row["done"] is True and row["done_reason"] == "stop"
    assert row["eval_count"] > 0 and row["prompt_eval_count"] > 0
    times = [row[name] for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")]
    assert all(isinstance(time, int) and time >= 0 for time in times) and times[0] >= max(times[1:])


def test_a_chat_streams_unless_told_otherwise(client: TestClient) -> None:
    rows = rows_of(client.post("/api/chat", json={"model": NAME, **HELLO}))
    assert {row["model"] for row in rows} == {NAME}
    assert "".join(row["message"]["content"] for row in rows) == REPLY
    assert [row["done"] for row in rows] == [False] * (len(rows) - 1) + [True]
    check_ending(rows[-1])
    whole = client.post("/api/chat", json={"model": NAME, **HELLO, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": REPLY}
    check_ending(whole)
    assert whole["eval_count"] == rows[-1]["eval_count"]


def test_a_text_that_is_generated_can_be_gone_on_with(client: TestClient) -> None:
    rows = rows_of(client.post("/api/generate", json={"model": NAME, "prompt": "hi"}))
    assert "".join(row["response"] for row in rows) == REPLY
    check_ending(rows[-1])
    first = client.post("/api/generate", json={"model": NAME, "prompt": "hi", "stream": False}).json()
    assert first["context"] == rows[-1]["context"]
    body = {"model": NAME, "prompt": "more", "stream": False, "context": first["context"]}
    second = client.post("/api/generate", json=body).json()
    assert second["context"][: len(first["context"])] == first["context"]
    assert second["prompt_eval_count"] > first["prompt_eval_count"]


def test_a_raw_prompt_has_no_template(client: TestClient) -> None:
    raw = client.post("/api/generate", json={"model": NAME, "prompt": "hi", "raw": True, "stream": False}).json()
    assert raw["response"] == REPLY and "context" not in raw
    templated = client.post("/api/generate", json={"model": NAME, "prompt": "hi", "stream": False}).json()
    assert raw["prompt_eval_count"] < templated["prompt_eval_count"]


def test_bodies_need_no_content_type_unless_a_foreign_page_sends_them(client: TestClient) -> None:
    body = json.dumps({"model": NAME, **HELLO, "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/api/chat", content=body, headers=form).json()["message"]["content"] == REPLY
    evil = {"origin": "https://elsewhere.example"}
    refused = client.post("/api/chat", content=body, headers=form | evil)
    assert refused.status_code == 403 and "another origin" in refused.json()["error"]
    assert client.post("/api/chat", content=body, headers=JSON | evil).status_code == 200


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_predict": 7, "repeat_penalty": 1.5}, {"max_tokens": 7, "repetition_penalty": 1.5}),
        ({"num_predict": -1, "seed": -1, "top_k": -1}, {}),
        ({"seed": 3.0, "temperature": 0, "stop": ["a"]}, {"seed": 3, "temperature": 0.0, "stop": ["a"]}),
        ({"num_ctx": 4096}, {"num_ctx": 4096}),
        ({"num_ctx": -1, "num_gpu": 1, "use_mmap": True, "repeat_last_n": 64}, {}),
        ({"nobody_knows": 1, "mirostat": 2, "xtc_probability": 0.5}, {"mirostat": 2, "xtc_probability": 0.5}),
        ({"temperature": None}, {}),
    ],
)
def test_options_become_fields(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_options({"model": "m", "options": options}) == {"model": "m", **expected}


def test_a_field_wins_over_an_option() -> None:
    assert with_options({"seed": 1, "options": {"seed": 2}}) == {"seed": 1}


def test_options_are_obeyed(client: TestClient) -> None:
    short = client.post("/api/chat", json={**HELLO, "stream": False, "options": {"num_predict": 1}}).json()
    assert (short["done_reason"], short["eval_count"]) == ("length", 1)
    stopped = client.post("/api/chat", json={**HELLO, "stream": False, "options": {"stop": ["day"]}}).json()
    assert (stopped["done_reason"], stopped["message"]["content"]) == ("stop", "good ")
    seeded = client.post("/api/chat", json={**HELLO, "stream": False, "options": {"seed": 11}}).json()
    assert seeded["seed"] == 11


def test_a_smaller_context_bounds_prompt_and_answer(client: TestClient) -> None:
    def ask(num_ctx: int, **options: Any) -> Any:
        body = {**HELLO, "stream": False, "options": {"num_ctx": num_ctx, **options}}
        return client.post("/api/chat", json=body)

    used = ask(1 << 20).json()  # more than there is
    assert used["done_reason"] == "stop"
    prompt = used["prompt_eval_count"]
    assert ask(prompt + 2).json()["done_reason"] == "length"
    assert ask(prompt + 2, num_predict=1).json()["eval_count"] == 1
    refused = ask(prompt)
    assert refused.status_code == 400 and "num_ctx" in refused.json()["error"]


def test_steering_of_the_other_apis(client: TestClient) -> None:
    body = {**HELLO, "stream": False, "regex": "[0-9]{3}", "options": {"temperature": 0}}
    assert client.post("/api/chat", json=body).json()["message"]["content"].isdigit()
    body = {"prompt": "hi", "stream": False, "choice": ["left", "right"]}
    assert client.post("/api/generate", json=body).json()["response"] in ("left", "right")
    bad = client.post("/api/chat", json={**HELLO, "controller": "nobody's"})
    assert bad.status_code == 400 and "control runtime" in bad.json()["error"]


def test_an_answer_has_the_format_that_is_asked_for(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    for route, body in (("/api/chat", HELLO), ("/api/generate", {"prompt": "hi"})):
        answer = client.post(route, json={**body, "stream": False, "format": {**schema, "additionalProperties": False}})
        text = answer.json().get("response") or answer.json()["message"]["content"]
        assert type(json.loads(text)["on"]) is bool
        both = client.post(route, json={**body, "format": schema, "regex": "a"})
        assert both.status_code == 400
    wrong = client.post("/api/chat", json={**HELLO, "format": "yaml"})
    assert wrong.status_code == 400
    assert wrong.json() == {"error": "invalid format: 'yaml'; expected \"json\" or a valid JSON Schema object"}


def test_each_token_has_its_logprobs(client: TestClient) -> None:
    rows = rows_of(client.post("/api/chat", json={**HELLO, "logprobs": True, "top_logprobs": 2}))
    entries = [entry for row in rows for entry in row.get("logprobs", ())]
    assert len(entries) == rows[-1]["eval_count"]
    assert {"token", "logprob", "top_logprobs"} <= entries[0].keys() and len(entries[0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("/api/chat", {**HELLO, "model": "nobody"}, 404, "'nobody' is not served here"),
        ("/api/chat", {}, 400, "model is required"),
        ("/api/chat", {"messages": [{"role": "judge", "content": "x"}]}, 400, "messages[0].role is 'judge'"),
        ("/api/chat", {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content is 3"),
        (
            "/api/chat",
            {**HELLO, "options": {"top_k": "many"}},
            400,
            "option 'top_k' is 'many'; must be of",
        ),
        ("/api/chat", {**HELLO, "options": {"stop": "a"}}, 400, "option 'stop' is 'a'; must be of type array"),
        ("/api/chat", {**HELLO, "options": {"temperature": -1}}, 400, "temperature is -1"),
        ("/api/chat", {**HELLO, "options": [1]}, 400, "options must be an object"),
        ("/api/chat", {**HELLO, "keep_alive": "soon"}, 400, "keep_alive is 'soon'"),
        ("/api/chat", {**HELLO, "think": "hard"}, 400, "think is 'hard'"),
        ("/api/chat", {**HELLO, "think": True}, 400, "does not support thinking"),
        ("/api/chat", {**HELLO, "top_logprobs": 21}, 400, "top_logprobs is 21"),
        ("/api/chat", {**HELLO, "n": 2}, 400, "n is 2"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["/9j/AA"]}]}, 400, "reads only text"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "does not support insert"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "s"}, 400, "raw mode does not support"),
        ("/api/generate", {"prompt": "a", "context": [10**9]}, 400, "1000000000"),
        ("/api/embed", {"input": {"a": 1}}, 400, "must be a string or a list of strings"),
        ("/api/show", {"model": "nobody"}, 404, "'nobody'"),
        ("/api/show", {}, 400, "model is required"),
        ("/api/copy", {"source": "a", "destination": "b"}, 400, "--model-alias"),
        ("/api/create", {"model": "a"}, 400, "/api/create is not supported"),
        ("/api/push", {"model": "a"}, 400, "/api/push is not supported"),
        ("/api/blobs/sha256:00", {}, 400, "not supported"),
        ("/api/pull", {"model": "smollm2"}, 403, "--allow-pull"),
    ],
)
def test_a_refusal_has_ollamas_shape_and_says_why(
    client: TestClient, route: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = client.post(route, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


def test_what_is_no_route_or_no_json_has_ollamas_shape(client: TestClient) -> None:
    assert client.get("/api/chat").json().keys() == {"error"}
    broken = client.post("/api/chat", content=b"{")
    assert broken.status_code == 400 and "not valid JSON" in broken.json()["error"]


def test_an_error_within_a_stream_is_its_last_object() -> None:
    def fails(prefix: Any) -> int:
        if len(prefix) > 40:
            raise UnsupportedModel("the device is gone")
        return 70

    with local_client(scripted_model(next_token=fails)) as client:
        rows = rows_of(client.post("/api/chat", json={**HELLO, "options": {"num_predict": 100}}))
        assert rows[-1].keys() == {"error"} and rows[-1]["error"]
        assert all(row["message"]["content"] and not row["done"] for row in rows[:-1])


def test_each_text_has_its_embedding(client: TestClient) -> None:
    answer = client.post("/api/embed", json={"model": NAME, "input": ["a", "b"]}).json()
    assert answer["model"] == NAME and len(answer["embeddings"]) == 2 and answer["prompt_eval_count"] >= 2
    one = client.post("/api/embed", json={"input": "a"}).json()["embeddings"]
    assert one == answer["embeddings"][:1]
    assert client.post("/api/embeddings", json={"prompt": "a"}).json() == {"embedding": one[0]}
    assert client.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}
    assert client.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    long = "word " * 5_000
    assert client.post("/api/embed", json={"input": long}).status_code == 200
    assert client.post("/api/embed", json={"input": long, "truncate": False}).status_code == 400


def test_the_models_that_are_here_are_listed_and_shown(client: TestClient) -> None:
    assert client.get("/api/version").json().keys() == {"version", "bridle"}
    (row,) = client.get("/api/tags").json()["models"]
    assert row["name"] == row["model"] == NAME and len(row["digest"]) == 64
    assert row["details"].keys() >= {"format", "family", "parameter_size", "quantization_level"}
    (row,) = client.get("/api/ps").json()["models"]
    assert row["name"] == NAME and row["context_length"] == 512 and row["expires_at"]
    for body in ({"model": NAME}, {"name": NAME + ":latest"}):
        shown = client.post("/api/show", json=body).json()
        assert "completion" in shown["capabilities"] and shown["template"]
        assert shown["model_info"]["unknown.context_length"] == 512
    assert client.head("/api/tags").status_code == 200


def test_without_a_prompt_the_model_is_loaded(client: TestClient) -> None:
    loaded = client.post("/api/generate", json={"model": NAME + ":latest"}).json()
    assert (loaded["done"], loaded["done_reason"], loaded["response"]) == (True, "load", "")
    loaded = client.post("/api/chat", json={"model": NAME, "messages": [], "keep_alive": "5m"}).json()
    assert loaded["done_reason"] == "load"
    pinned = client.post("/api/generate", json={"model": NAME, "keep_alive": 0})
    assert pinned.status_code == 400 and "cannot be unloaded" in pinned.json()["error"]


# -- tools ---------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": None,
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def test_calls_of_tools_have_ollamas_shape() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with local_client(scripted_model(next_token=saying(call))) as client:
        body = {**HELLO, "tools": [WEATHER], "options": {"temperature": 0}}
        whole = client.post("/api/chat", json={**body, "stream": False}).json()
        (found,) = whole["message"]["tool_calls"]
        assert found["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo"}}
        assert found["id"] and whole["message"]["content"] == "" and whole["done_reason"] == "stop"
        rows = rows_of(client.post("/api/chat", json=body))
        (streamed,) = [each for row in rows for each in row["message"].get("tool_calls", ())]
        assert streamed["function"] == found["function"]
        forced = {**HELLO, "tools": [WEATHER], "tool_choice": "required", "stream": False}
        assert client.post("/api/chat", json=forced).json()["message"]["tool_calls"]


def test_results_of_tools_find_their_calls() -> None:
    from bridle.http.ollama.messages import to_messages

    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("one", "two")]
    results: list[dict[str, Any]] = [{"role": "tool", "tool_name": name, "content": name} for name in ("two", "one")]
    made = to_messages([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    ids = {call["function"]["name"]: call["id"] for call in made[0]["tool_calls"]}
    assert [message["tool_call_id"] for message in made[1:]] == [ids["two"], ids["one"]]
    assert made[0]["tool_calls"][0]["function"]["arguments"] == '{"x":1}'


# -- pulling -------------------------------------------------------------------------------------------------


class Loader:
    """A loader that returns a scripted model for any name."""

    def measure(self, config: ModelConfig, name: str) -> Needs:
        return Needs(1, 0)

    def make_room(self, config: ModelConfig) -> ModelConfig:
        return config

    def load(self, config: ModelConfig, name: str, progress: Report) -> LoadedModel:
        return scripted_model(next_token=saying(REPLY), name=name)


def pulling_client(keys: KeyStore | None = None) -> TestClient:
    """Return a client of a server that may pull models. One model is present already."""
    registry = ModelRegistry(catalog=ModelCatalog(pulled=True), keeper=ModelManager(Loader()))
    registry.add(scripted_model(next_token=saying(REPLY)))
    return TestClient(create_app(registry, HttpSettings(), keys), raise_server_exceptions=False)


def test_a_pull_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_MODELS", str(tmp_path))
    entry = find_entry("minilm")
    assert entry is not None

    def pull_entry(wanted: Any, report: Any, pip: Any = None) -> Path:
        assert wanted is entry
        report("downloading", 0.5)
        (store.models_folder() / entry.folder_name).mkdir(parents=True)
        return tmp_path

    monkeypatch.setattr(manage, "pull_entry", pull_entry)
    with pulling_client() as client:
        rows = rows_of(client.post("/api/pull", json={"model": "all-minilm:latest"}))
        assert rows[0] == {"status": "pulling manifest"} and rows[-1] == {"status": "success"}
        counts = [row for row in rows if "total" in row]
        assert counts[-1]["completed"] == counts[-1]["total"] == entry.download_bytes
        assert counts[-1]["digest"] == f"sha256:{entry.sha256}"
        names = [row["name"] for row in client.get("/api/tags").json()["models"]]
        assert names == [NAME, "minilm"]
        assert rows_of(client.post("/api/pull", json={"model": NAME}))[-1] == {"status": "success"}
        unknown = client.post("/api/pull", json={"model": "nobody", "stream": False})
        assert unknown.status_code == 404 and "smollm2" in unknown.json()["error"]
        assert client.request("DELETE", "/api/delete", json={"model": "minilm"}).status_code == 200
        again = client.request("DELETE", "/api/delete", json={"model": "minilm"})
        assert again.status_code == 404 and "not on this machine" in again.json()["error"]
        client.app.state.http.registry.close()  # type: ignore[attr-defined]


def test_a_failed_pull_ends_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def pull_entry(*_: Any) -> Path:
        raise UnsupportedModel("the index is away")

    monkeypatch.setattr(manage, "pull_entry", pull_entry)
    with pulling_client() as client:
        rows = rows_of(client.post("/api/pull", json={"model": "minilm"}))
        assert rows[-1] == {"error": "the index is away"}
        whole = client.post("/api/pull", json={"model": "minilm", "stream": False})
        assert whole.json() == {"error": "the index is away"} and whole.status_code >= 400
        assert client.app.state.http.num_pulls == 0  # type: ignore[attr-defined]
        client.app.state.http.registry.close()  # type: ignore[attr-defined]


def test_a_pulled_model_is_loaded_by_name_and_unloaded_before_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDLE_MODELS", str(tmp_path))
    (tmp_path / "minilm").mkdir()
    body = {"model": "all-minilm:latest", **HELLO, "stream": False}
    with pulling_client() as client:

        def loaded() -> list[str]:
            return [row["name"] for row in client.get("/api/ps").json()["models"]]

        assert loaded() == [NAME]
        address = {"model": "http://127.0.0.1:8080", **HELLO, "stream": False}  # as some clients call the one model
        assert client.post("/api/chat", json=address).json()["message"]["content"] == REPLY
        assert client.post("/api/chat", json=body).json()["message"]["content"] == REPLY
        assert loaded() == [NAME, "minilm"]
        unloaded = client.post("/api/generate", json={"model": "minilm", "keep_alive": "0s"}).json()
        assert unloaded["done_reason"] == "unload" and loaded() == [NAME]
        client.post("/api/chat", json=body)
        assert client.request("DELETE", "/api/delete", json={"model": "minilm"}).status_code == 200
        assert loaded() == [NAME] and not (tmp_path / "minilm").exists()
        assert client.post("/api/chat", json=body).status_code == 404
        client.app.state.http.registry.close()  # type: ignore[attr-defined]


def test_a_model_stays_as_long_as_an_admin_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_MODELS", str(tmp_path))
    (tmp_path / "minilm").mkdir()
    keys = KeyStore(tmp_path / "keys.db")
    user, admin = (f"Bearer {key}" for key in (keys.add("ann"), keys.add("root", is_admin=True)))
    with pulling_client(keys) as client:

        def expiry() -> str | None:
            rows = client.get("/api/ps", headers={"authorization": admin}).json()["models"]
            return next((row["expires_at"] for row in rows if row["name"] == "minilm"), None)

        def ask(keep_alive: Any, key: str = admin) -> None:
            body = {"model": "minilm", **HELLO, "stream": False, "keep_alive": keep_alive}
            assert client.post("/api/chat", json=body, headers={"authorization": key}).status_code == 200

        ask("5m", user)
        assert (never := expiry()) is not None and never.startswith("9999")
        ask("5m")
        assert (later := expiry()) is not None and not later.startswith("9999")
        ask(-1)
        assert expiry() == never
        ask("0s")
        until(lambda: expiry() is None)
        client.app.state.http.registry.close()  # type: ignore[attr-defined]
    keys.close()


def test_only_admins_manage_models(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    user, admin = keys.add("ann"), keys.add("root", is_admin=True)
    with pulling_client(keys) as client:
        for headers, status in (({}, 401), ({"authorization": f"Bearer {user}"}, 403)):
            for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
                answer = client.request(method, path, json={"model": "minilm"}, headers=headers)
                assert answer.status_code == status and answer.json().keys() == {"error"}
            unload = {"model": NAME, "keep_alive": 0}
            assert client.post("/api/generate", json=unload, headers=headers).status_code == status
        as_admin = {"authorization": f"Bearer {admin}"}
        assert client.request("DELETE", "/api/delete", json={"model": "minilm"}, headers=as_admin).status_code == 404
        client.app.state.http.registry.close()  # type: ignore[attr-defined]
    keys.close()


# -- the demo models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("think", "thinks"), [(True, True), ("low", True), (False, False)])
def test_thoughts_are_apart(demo_server: str, think: bool | str, thinks: bool) -> None:
    fields = {"think": think, "options": {"temperature": 0, "num_predict": 80}}
    question = "What is 12 + 34?"
    ask = {"messages": [{"role": "user", "content": question}], "stream": False, **fields}
    message = httpx.post(f"{demo_server}/api/chat", json=ask).json()["message"]
    assert message["content"] == "12 + 34 = 46" and bool(message.get("thinking")) is thinks
    streamed = httpx.post(f"{demo_server}/api/generate", json={"prompt": question, **fields})
    rows = rows_of(streamed)
    assert "".join(row["response"] for row in rows) == message["content"]
    assert "".join(row.get("thinking", "") for row in rows) == message.get("thinking", "")


def test_images_are_seen() -> None:
    data = base64.b64encode((ROOT / "examples/pictures/shapes.png").read_bytes()).decode()
    options = {"stream": False, "options": {"temperature": 0}}
    with served(load_model(ModelConfig("demo-sees", num_blocks=512))) as url:
        turn = {"role": "user", "content": "What do you see?", "images": [data]}
        message = httpx.post(f"{url}/api/chat", json={"messages": [turn], **options}).json()["message"]
        assert "red circle" in message["content"]
        text = httpx.post(f"{url}/api/generate", json={"prompt": "What do you see?", "images": [data], **options})
        assert text.json()["response"] == message["content"]
        assert "vision" in httpx.post(f"{url}/api/show", json={"model": "demo-sees"}).json()["capabilities"]
        both = httpx.post(f"{url}/api/generate", json={"prompt": "x", "images": [data], "raw": True})
        assert both.status_code == 400 and "leave those out" in both.json()["error"]
