"""Tests of `/v1/embeddings`: embeddings of texts, computed by the same engine, in OpenAI's format."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from bridle.engine.request import Request
from bridle.errors import DeadlineExceeded
from bridle.http import create_app
from bridle.http.openai.batch import answer_batch, read_requests
from bridle.http.openai.embeddings import MAX_AT_ONCE, MAX_INPUTS
from bridle.llm import LLM
from bridle.outputs import Embedded, Event, Finished, FinishReason, Usage
from bridle.serving import ModelRegistry
from tests.http.harness import local_client, scripted_model, served
from tests.serving.fakes import fake_model, prompt_event

PATH, SIZE = "/v1/embeddings", 24


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(scripted_model(embedding_size=SIZE)) as client:
        yield client


def vectors(client: TestClient, given: Any, **fields: Any) -> list[list[float]]:
    answer = client.post(PATH, json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [row["index"] for row in data] == list(range(len(data)))
    return [row["embedding"] for row in data]


def test_a_model_without_a_pooling_head_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with local_client(scripted_model(embedding_size=SIZE)) as client:
        assert "pooling head" not in caplog.text
        for path, field in ((PATH, "input"), ("/api/embed", "input"), ("/embed", "inputs"), (PATH, "input")):
            assert client.post(path, json={field: "a"}).status_code == 200
    assert caplog.text.count("scripted has no pooling head: an embedding is the last token's hidden state") == 1


def test_the_real_client_gets_vectors_of_length_one() -> None:
    """The client requests base64 and decodes the numbers itself."""
    with served(scripted_model(embedding_size=SIZE)) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        texts = ["Hello", "there", "Hello"]
        answer = client.embeddings.create(model="scripted", input=texts)
        plain = client.embeddings.create(model="scripted", input=texts, encoding_format="float")
        client.close()
    found = [row.embedding for row in answer.data]
    assert [len(vector) for vector in found] == [SIZE] * 3
    assert all(math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5) for vector in found)
    assert found[0] == found[2] != found[1]
    assert found == [pytest.approx(row.embedding) for row in plain.data]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    assert answer.model == "scripted"


def test_texts_and_tokens_are_alike(client: TestClient) -> None:
    tokens = client.post("/tokenize", json={"inputs": "Hello"}).json()
    ids = [row["id"] for row in tokens]
    assert vectors(client, "Hello") == vectors(client, ids) == vectors(client, [ids]) == vectors(client, ["Hello"])


def test_base64_is_32_bit_numbers(client: TestClient) -> None:
    (plain,) = vectors(client, "Hello")
    answer = client.post(PATH, json={"input": "Hello", "encoding_format": "base64"}).json()
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack(f"<{SIZE}f", data) == pytest.approx(plain)


def test_many_texts_run_a_few_at_a_time() -> None:
    """Only as many texts as run at once take request slots, and all slots are freed."""
    model = fake_model(embedding_script)
    fake: Any = model.client
    app = create_app(ModelRegistry([model]))
    seen: list[int] = []
    submit = fake.submit
    fake.submit = lambda request: (seen.append(app.state.http.admission.num_requests), submit(request))[1]
    found = vectors(TestClient(app), [chr(97 + number % 26) for number in range(100)])
    assert len(found) == 100 and found[0] == found[26]
    assert set(seen) == {MAX_AT_ONCE}
    assert app.state.http.admission.num_requests == app.state.http.admission.num_tokens == 0


def embedding_script(request: Request) -> Iterator[list[Event]]:
    yield [prompt_event(request)]
    vector = array("f", [1.0, float(request.prompt[0])])
    usage = Usage(prompt_tokens=len(request.prompt))
    yield [Embedded(request.id, 0, vector), Finished(request.id, 0, FinishReason.STOP, usage)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "input"),
        ({"input": []}, "input must be a string, a list"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, f"input has {MAX_INPUTS + 1} texts; at most {MAX_INPUTS}"),
        ({"input": [1, "a"]}, "input must be a string, a list"),
        ({"input": [999_999]}, "holds token 999999"),
        (
            {"input": "a", "dimensions": SIZE + 1},
            f"dimensions is {SIZE + 1}; must be from 1 to {SIZE}",
        ),
        ({"input": "a", "dimensions": 0}, "dimensions is 0"),
        ({"input": "a", "prompt_name": "query"}, "has no prompt named 'query'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x" * 100_000}, "100000 characters"),
        ({"input": "a", "priority": 1000}, "priority is 1000"),
        ({"input": "a", "model": "gpt"}, "not served here"),
    ],
)
def test_what_cannot_be_had_is_refused(client: TestClient, fields: dict[str, Any], message: str) -> None:
    answer = client.post(PATH, json=fields)
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]


def test_many_vectors_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer is complete JSON with the announced length. A slow reader occupies no request slot."""
    monkeypatch.setattr("bridle.http.chunked_json.PIECE_BYTES", 100)
    model = fake_model(embedding_script)
    app = create_app(ModelRegistry([model]))
    seen: list[tuple[int, int]] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            seen.append((len(message.get("body", b"")), app.state.http.admission.num_requests))
            await send(message)

        await app(scope, receive, note)

    answer = TestClient(watched).post(PATH, json={"input": ["a", "b", "c"] * 20})
    assert [row["embedding"][1] for row in answer.json()["data"]] == [97.0, 98.0, 99.0] * 20
    assert answer.json()["usage"]["prompt_tokens"] == 60 and int(answer.headers["content-length"]) == len(
        answer.content
    )
    assert len(seen) > 20 and max(size for size, _ in seen) < 300 and {held for _, held in seen} == {0}


def test_a_vector_is_cut_to_fewer_dimensions_and_has_length_one_again(client: TestClient) -> None:
    (whole,) = vectors(client, "a", dimensions=SIZE)
    assert whole == vectors(client, "a")[0] and len(whole) == SIZE
    (part,) = vectors(client, "a", dimensions=5)
    length = math.hypot(*whole[:5])
    assert part == pytest.approx([value / length for value in whole[:5]], abs=1e-6)


def test_a_text_that_is_too_long_is_cut_if_that_is_wanted(client: TestClient) -> None:
    assert len(vectors(client, "x" * 600, truncate_prompt_tokens=-1)[0]) == SIZE
    assert vectors(client, "xyz", truncate_prompt_tokens=1) == vectors(client, "z")


def test_a_backend_without_hidden_states_says_so() -> None:
    with local_client(scripted_model()) as client:
        answer = client.post(PATH, json={"input": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_feature"
    assert "computes no embeddings" in answer.json()["error"]["message"]


def test_a_failure_breaks_the_call_off_and_leaves_nothing() -> None:
    def script(request: Request) -> Iterator[list[Event]]:
        if request.prompt == (98,):
            yield [Finished(request.id, 0, FinishReason.DEADLINE, error=DeadlineExceeded("too late"))]
        else:
            yield [prompt_event(request)]

    model = fake_model(script, is_endless=True)
    app = create_app(ModelRegistry([model]))
    answer = TestClient(app).post(PATH, json={"input": ["a", "b", "c"], "deadline": 5})
    assert answer.status_code == 504 and "too late" in answer.text
    streams: Any = model.client.streams  # type: ignore[attr-defined]
    assert [stream.is_cancelled for stream in streams] == [True, True, True]
    assert app.state.http.admission.num_requests == 0 and app.state.http.live == {}


def test_vectors_and_tokens_share_the_engine(client: TestClient) -> None:
    """A prompt that was computed for its embedding is cached for a completion of the same prompt."""
    text = "a text that is longer than some blocks of the cache " * 3
    vectors(client, text)
    usage = client.post("/v1/completions", json={"prompt": text, "max_tokens": 2}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_metrics_know_the_route(client: TestClient) -> None:
    vectors(client, "a")
    text = client.get("/metrics").text
    assert 'bridle_http_requests_total{model="scripted",route="/v1/embeddings",status="200"}' in text
    assert 'gen_ai_operation_name="embeddings"' in text


def test_llm_embeds() -> None:
    model = scripted_model(embedding_size=SIZE)
    with LLM(model) as llm:
        one, two, again = llm.embed(["Hello", "there", "Hello"], use_tqdm=False)
        assert one == again != two
        assert math.isclose(math.hypot(*one), 1.0, rel_tol=1e-5)
        with pytest.raises(ValueError, match="prompt"):
            llm.embed([[]], use_tqdm=False)


async def test_a_batch_may_ask_for_vectors_on_terms() -> None:
    """Every user is an admin in offline mode, so any priority is allowed."""
    model = fake_model(embedding_script)
    lines = [b'{"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "a", "priority": -7, "deadline": 60}}']
    app = create_app(ModelRegistry([model]))
    (answer,) = [answer async for answer in answer_batch(app, read_requests(lines), 4)]
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["data"][0]["embedding"] == [1.0, 97.0]
    (request,) = model.client.requests  # type: ignore[attr-defined]
    assert request.priority == -7 and request.deadline is not None
