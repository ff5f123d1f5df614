"""Tests that embedding models, cross-encoders and classifiers return the results of transformers on all routes, in the
format of each server."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from bridle.cli import setup_probes
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.http.curl_line import curl_line
from bridle.http.openai.batch import answer_batch, read_requests
from bridle.llm import LLM
from bridle.model.check import check_model
from tests.fakes.encoder_checkpoints import make_encoder
from tests.http.harness import local_client
from tests.http.pooling_models import LABELS, embedder, loaded, ranker, sorter

TEXTS = ["Bears eat honey", "Paris is in France", "A bear in the wood", "Honey"]


@pytest.fixture(scope="module")
def embeds() -> Iterator[TestClient]:
    with local_client(loaded(embedder())) as client:
        yield client


@pytest.fixture(scope="module")
def ranks() -> Iterator[TestClient]:
    with local_client(loaded(ranker())) as client:
        yield client


@pytest.fixture(scope="module")
def sorts() -> Iterator[TestClient]:
    with local_client(loaded(sorter())) as client:
        yield client


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- what the library makes of the same texts ----------------------------------------------------------------


@cache
def library(folder: Path) -> tuple[Any, Any]:
    kind = AutoModel if folder == embedder() else AutoModelForSequenceClassification
    return kind.from_pretrained(folder, attn_implementation="eager").eval(), AutoTokenizer.from_pretrained(folder)


def vector_of(text: str, limit: int = 40) -> list[float]:
    from safetensors.torch import load_file

    model, tokenizer = library(embedder())
    dense = load_file(embedder() / "2_Dense" / "model.safetensors")
    with torch.inference_mode():
        rows = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)).last_hidden_state[0]
    found: list[float] = torch.tanh(dense["linear.weight"] @ rows.mean(0) + dense["linear.bias"]).tolist()
    return found


def unit(vector: list[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector]


def logits_of(folder: Path, *texts: str) -> list[float]:
    model, tokenizer = library(folder)
    with torch.inference_mode():
        found: list[float] = (
            model(**tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)).logits[0].tolist()
        )
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def near(values: Any) -> Any:
    return pytest.approx(values, abs=2e-5)


# -- vectors -------------------------------------------------------------------------------------------------


def test_embeddings_are_those_of_the_folders_modules(embeds: TestClient) -> None:
    answer = post(embeds, "/v1/embeddings", input=TEXTS)
    assert [row["embedding"] for row in answer["data"]] == [near(unit(vector_of(text))) for text in TEXTS]
    assert answer["usage"]["prompt_tokens"] == sum(len(library(embedder())[1](text).input_ids) for text in TEXTS)
    coded = post(embeds, "/v1/embeddings", input=TEXTS[0], encoding_format="base64", dimensions=4)["data"][0]
    first = struct.unpack("<4f", base64.b64decode(coded["embedding"]))
    assert list(first) == near(unit(vector_of(TEXTS[0])[:4]))


def test_prompts_of_the_folder_come_before_texts(embeds: TestClient) -> None:
    (row,) = post(embeds, "/v1/embeddings", input="honey", prompt_name="query")["data"]
    assert row["embedding"] == near(unit(vector_of("find: honey")))
    refused = embeds.post("/v1/embeddings", json={"input": "honey", "prompt_name": "passage"})
    assert refused.status_code == 400 and "its prompts are: document, query" in refused.json()["error"]["message"]


def test_long_texts_are_refused_or_cut_as_the_library_cuts_them(embeds: TestClient) -> None:
    text = "A bear in the wood eats honey all day long"
    refused = embeds.post("/v1/embeddings", json={"input": text * 2})
    assert refused.status_code == 400 and "maximum context length is 40" in refused.json()["error"]["message"]
    assert post(embeds, "/embed", inputs=[text * 2], truncate=True) == [near(unit(vector_of(text * 2)))]
    (row,) = post(embeds, "/v1/embeddings", input=text, truncate_prompt_tokens=7)["data"]
    assert row["embedding"] == near(unit(vector_of(text, 7)))


def test_embed_gives_a_bare_list(embeds: TestClient) -> None:
    assert post(embeds, "/embed", inputs="Honey") == [near(unit(vector_of("Honey")))]
    raw = post(embeds, "/embed", inputs=TEXTS[:2], normalize=False, dimensions=3)
    assert raw == [near(vector_of(text)[:3]) for text in TEXTS[:2]]
    assert post(embeds, "/", inputs=TEXTS[0], normalize=True) == [near(unit(vector_of(TEXTS[0])))]
    assert post(embeds, "/invocations", inputs=["Honey"]) == [near(unit(vector_of("Honey")))]


def test_similarities_and_scores_are_cosines(embeds: TestClient) -> None:
    first, *others = [unit(vector_of(text)) for text in TEXTS]
    want = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    asked = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    assert post(embeds, "/similarity", inputs=asked) == near(want)
    assert post(embeds, "/", inputs=asked, parameters={}) == near(want)
    rows = post(embeds, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:])["data"]
    assert [row["score"] for row in rows] == near(want)
    ranked = post(embeds, "/v1/rerank", query=TEXTS[0], documents=TEXTS[1:])["results"]
    assert {row["index"]: row["relevance_score"] for row in ranked} == {i: near(value) for i, value in enumerate(want)}


# -- labels and scores ---------------------------------------------------------------------------------------


def test_a_cross_encoder_scores_pairs(ranks: TestClient) -> None:
    want = [sigmoid(logits_of(ranker(), "Bears", text)[0]) for text in TEXTS]
    rows = post(ranks, "/v1/score", text_1="Bears", text_2=TEXTS)["data"]
    assert [row["score"] for row in rows] == near(want)
    ranked = post(ranks, "/v1/rerank", query="Bears", documents=TEXTS, top_n=2)["results"]
    order = sorted(range(4), key=lambda i: -want[i])
    assert [row["index"] for row in ranked] == order[:2]
    raw = post(ranks, "/rerank", query="Bears", texts=TEXTS, raw_scores=True, truncate=True)
    assert [row["score"] for row in raw] == near([logits_of(ranker(), "Bears", TEXTS[i])[0] for i in order])


def test_a_cross_encoders_own_activation_is_taken(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path / "model", labels=["relevant"])
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(str(folder), warm_up=False) as llm:
        assert llm.score("Bears", TEXTS, use_tqdm=False) == near([logits_of(folder, "Bears", t)[0] for t in TEXTS])


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_relative_positions_rank_on_every_route(family: str, tmp_path: Path) -> None:
    folder = make_encoder(family, tmp_path / "model", labels=["relevant"], bos_token_id=0, pad_token_id=1)
    with local_client(loaded(folder)) as client:
        rows = post(client, "/v1/score", text_1="Bears", text_2=TEXTS)["data"]
        want = [row["score"] for row in rows]
        ranked = post(client, "/v1/rerank", query="Bears", documents=TEXTS)["results"]
        found = post(client, "/v1/classify", input=["Honey"])["data"]
    assert [row["relevance_score"] for row in ranked] == near(sorted(want, reverse=True))
    assert len({round(score, 6) for score in want}) > 1 and found[0]["num_classes"] == 1
    with LLM(str(folder), warm_up=False) as llm:
        assert llm.score("Bears", TEXTS, use_tqdm=False) == near(want)


def test_labels_in_the_shape_of_vllm(sorts: TestClient) -> None:
    answer = post(sorts, "/v1/classify", input=TEXTS)
    for row, text in zip(answer["data"], TEXTS, strict=True):
        probs = torch.tensor(logits_of(sorter(), text)).softmax(-1).tolist()
        assert row["probs"] == near(probs) and row["num_classes"] == 3
        assert row["label"] == LABELS[probs.index(max(probs))]
    assert answer["usage"]["total_tokens"] > 0 and answer["id"].startswith("classify-")
    (bare,) = post(sorts, "/classify", input=TEXTS[0], use_activation=False)["data"]
    assert bare["probs"] == near(logits_of(sorter(), TEXTS[0]))


def test_predictions_in_the_shape_of_text_embeddings_inference(sorts: TestClient) -> None:
    def want(*texts: str) -> list[dict[str, Any]]:
        scores = torch.tensor(logits_of(sorter(), *texts)).softmax(-1).tolist()
        rows = sorted(zip(scores, LABELS, strict=True), reverse=True)
        return [{"score": near(score), "label": label} for score, label in rows]

    assert post(sorts, "/predict", inputs="Honey") == post(sorts, "/predict", inputs=["Honey"]) == want("Honey")
    assert post(sorts, "/predict", inputs=["Honey", "Bears"]) == want("Honey", "Bears")
    assert post(sorts, "/predict", inputs=[["Honey"], ["a", "b"]]) == [want("Honey"), want("a", "b")]
    assert post(sorts, "/", inputs="Honey", parameters={"top_k": 2}) == [want("Honey")[:2]]
    bare = post(sorts, "/", inputs="Honey", parameters={"function_to_apply": "none"})[0]
    assert [row["score"] for row in bare] == near(sorted(logits_of(sorter(), "Honey"), reverse=True))


# -- what a model is not for ---------------------------------------------------------------------------------

_CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
_RUN = {"controller": "x", "controller_arg": "", "prompt": "Hello"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", _CHAT),
        ("/v1/messages", {**_CHAT, "max_tokens": 5}),
        ("/v1/responses", {"input": "Hello"}),
        ("/generate", {"inputs": "Hello"}),
        ("/generate_stream", {"inputs": "Hello"}),
        ("/v1/run", _RUN),
    ],
)
def test_routes_that_generate_say_what_the_model_is_for(embeds: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = embeds.post(path, json=body)
    assert answer.status_code == {"/v1/run": 501}.get(path, 422 if "inputs" in body else 400), answer.text
    assert "generates no text; it computes embeddings: ask /v1/embeddings" in answer.text


@pytest.mark.parametrize(
    ("model", "path", "body", "message"),
    [
        ("embeds", "/v1/classify", {"input": "a"}, "'embedder' computes embeddings"),
        ("embeds", "/predict", {"inputs": "a"}, "'embedder' computes embeddings"),
        ("sorts", "/v1/embeddings", {"input": "a"}, "'sorter' classifies texts; ask /v1/classify"),
        ("sorts", "/embed", {"inputs": "a"}, "'sorter' classifies texts"),
        ("sorts", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "classifies texts"),
        (
            "sorts",
            "/v1/score",
            {"text_1": "a", "text_2": "b"},
            "'sorter' has 3 labels; scores need a model with one label",
        ),
        ("sorts", "/v1/completions", {"prompt": "a"}, "it classifies texts: ask /v1/classify"),
        ("embeds", "/v1/embeddings", {"input": "a", "dimensions": 17}, "must be from 1 to 16"),
        ("embeds", "/v1/embeddings", {"input": [601]}, "holds token 601"),
        ("embeds", "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 41}, "must be 1 to 40"),
        ("embeds", "/embed", {"inputs": "a", "truncation_direction": "left"}, "truncated only at their end"),
        ("embeds", "/embed", {"inputs": {"a": 1}}, "inputs must be a string"),
        ("embeds", "/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "sentences"),
        ("sorts", "/predict", {"inputs": ["a", "b", "c"]}, "a list must have one text, or a pair of texts"),
        ("sorts", "/predict", {"inputs": [["a"], ["b", ""]]}, "empty text"),
        ("sorts", "/predict", {"inputs": 5}, "must be a text"),
        ("sorts", "/", {"inputs": "a", "parameters": {"top_k": 0}}, "top_k"),
        ("ranks", "/v1/rerank", {"query": "x" * 60_000, "documents": ["a"]}, "characters"),
        ("ranks", "/v1/rerank", {"query": "x" * 100, "documents": ["y" * 100]}, "maximum context length is 160"),
    ],
)
def test_what_cannot_be_had_is_refused(
    request: pytest.FixtureRequest, model: str, path: str, body: dict[str, Any], message: str
) -> None:
    answer = request.getfixturevalue(model).post(path, json=body)
    assert answer.status_code in (400, 422), answer.text
    assert message in answer.text


def test_models_say_what_they_are_for(embeds: TestClient, sorts: TestClient) -> None:
    (row,) = embeds.get("/v1/models").json()["data"]
    assert row["task"] == "embed" and row["embedding_size"] == 16 and row["prompts"] == ["query", "document"]
    (row,) = sorts.get("/v1/models").json()["data"]
    assert row["task"] == "classify" and row["labels"] == list(LABELS)
    assert embeds.get("/info").status_code == 200 and embeds.get("/metrics").status_code == 200


def test_commands_that_are_shown_fit_the_model(embeds: TestClient, sorts: TestClient) -> None:
    for client, path in ((embeds, "/v1/embeddings"), (sorts, "/v1/classify")):
        assert f"{path} -H" in curl_line(client.app.state.http.registry, "http://localhost/")


def test_the_doctor_says_what_a_model_is_for() -> None:
    (found,) = setup_probes.model(str(embedder()))
    assert found.text.endswith("computes embeddings")
    (found,) = setup_probes.model(str(sorter()))
    assert found.text.endswith("classifies texts")
    with pytest.raises(UnsupportedModel, match="checks such models while it loads them"):
        check_model(str(sorter()))


async def test_batch_files_take_labels_and_scores(sorts: TestClient) -> None:
    lines = [
        b'{"custom_id": "a", "url": "/v1/classify", "body": {"input": "Honey"}}',
        b'{"custom_id": "b", "url": "/v1/score", "body": {"text_1": "a", "text_2": "b"}}',
    ]
    answers = [answer async for answer in answer_batch(sorts.app, read_requests(lines), 4)]
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert found["a"]["body"]["data"][0]["num_classes"] == 3 and found["b"]["status_code"] == 400


# -- in Python -----------------------------------------------------------------------------------------------


def test_llm_gives_vectors_of_an_embedding_model() -> None:
    with LLM(str(embedder()), warm_up=False) as llm:
        assert llm.embed(TEXTS, use_tqdm=False) == [near(unit(vector_of(text))) for text in TEXTS]
        (part,) = llm.embed("honey", dimensions=5, prompt_name="query", use_tqdm=False)
        assert part == near(unit(vector_of("find: honey")[:5]))
        assert llm.embed(["Honey"], normalize=False, use_tqdm=False) == [near(vector_of("Honey"))]
        first, second = unit(vector_of(TEXTS[0])), unit(vector_of(TEXTS[1]))
        cosine = sum(a * b for a, b in zip(first, second, strict=True))
        assert llm.score(TEXTS[0], TEXTS[1], use_tqdm=False) == near([cosine])
        for call in (lambda: llm.generate("a"), lambda: llm.score("a"), lambda: llm.chat([{"role": "user"}])):
            with pytest.raises(InvalidRequest, match="generates no text"):
                call()
        with pytest.raises(InvalidRequest, match="computes embeddings"):
            llm.classify("a")


def test_llm_classifies() -> None:
    with LLM(str(sorter()), warm_up=False) as llm:
        one, pair = llm.classify(["Honey", ("a", "b")], use_tqdm=False)
        probs = torch.tensor(logits_of(sorter(), "Honey")).softmax(-1).tolist()
        assert list(one.scores.values()) == near(probs) and tuple(one.scores) == LABELS
        assert one.score == max(one.scores.values()) == one.scores[one.label]
        assert list(pair.scores.values()) == near(torch.tensor(logits_of(sorter(), "a", "b")).softmax(-1).tolist())
        with pytest.raises(InvalidRequest, match="a tuple of two texts"):
            llm.classify([["a", "b"]])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="classifies texts"):
            llm.embed("a")
        with pytest.raises(InvalidRequest, match="3 labels"):
            llm.score("a", "b")
