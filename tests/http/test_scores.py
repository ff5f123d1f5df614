"""Tests that `/v1/score` and `/v1/rerank` return the cosine similarities of the embeddings of `/v1/embeddings`, in the
formats of four servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.http.harness import local_client, scripted_model

TEXTS = ["Bears eat honey", "Paris is in France", "A bear in the wood", "Bears eat honey"]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with local_client(scripted_model(embedding_size=24)) as client:
        yield client


def cosine(client: TestClient, one: str, other: str) -> float:
    data = client.post("/v1/embeddings", json={"input": [one, other]}).json()["data"]
    return sum(a * b for a, b in zip(data[0]["embedding"], data[1]["embedding"], strict=True))


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_score_is_the_cosine_of_two_embeddings(client: TestClient) -> None:
    answer = post(client, "/v1/score", text_1="A bear", text_2=TEXTS)
    scores = [row["score"] for row in answer["data"]]
    assert scores == pytest.approx([cosine(client, "A bear", text) for text in TEXTS], abs=1e-5)
    assert [row["index"] for row in answer["data"]] == [0, 1, 2, 3] and answer["object"] == "list"
    assert answer["usage"]["total_tokens"] > 0
    pairs = post(client, "/score", text_1=TEXTS, text_2=TEXTS)["data"]
    assert [row["score"] for row in pairs] == pytest.approx([1.0] * 4, abs=1e-5)


def test_reranking_puts_the_closest_first(client: TestClient) -> None:
    answer = post(client, "/v1/rerank", query=TEXTS[0], documents=[*TEXTS, {"text": "Honey"}], top_n=3)
    rows = answer["results"]
    values = [row["relevance_score"] for row in rows]
    assert [row["index"] for row in rows[:2]] == [0, 3] and len(rows) == 3  # of equals the first comes first
    assert values == sorted(values, reverse=True) and values[0] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["document"] == {"text": TEXTS[0]}
    bare = post(client, "/v2/rerank", query="x", documents=TEXTS, return_documents=False)["results"]
    assert len(bare) == 4 and "document" not in bare[0]


def test_texts_get_the_answer_of_text_embeddings_inference(client: TestClient) -> None:
    rows = post(client, "/rerank", query=TEXTS[0], texts=TEXTS, return_text=True)
    assert rows[0].keys() == {"index", "score", "text"} and rows[0]["text"] == TEXTS[0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and param in answer.json()["error"]["param"], answer.text
