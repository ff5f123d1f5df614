"""Tests of `/v1/embeddings` of `bridle serve` with the model in child processes: vectors equal those of a model in this
process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from bridle.bench.serve_process import http_server
from bridle.llm import LLM
from tests.fakes.encoder_checkpoints import make_encoder
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TEXTS = ["Hello", "a longer text about ships and the sea " * 20, "7 + 5 =", "Hello"]


@pytest.fixture(scope="module")
def wanted() -> Iterator[torch.Tensor]:
    with LLM("demo", kv_memory=1 << 24) as llm:
        yield torch.tensor(llm.embed(TEXTS, use_tqdm=False))


@pytest.mark.parametrize(
    "flags",
    [("--isolate-model",), ("--shards", "2"), ("--replicas", "2"), ("--replicas", "2", "--isolate-model")],
    ids=" ".join,
)
def test_a_served_model_embeds(flags: tuple[str, ...], wanted: torch.Tensor, tmp_path: Path) -> None:
    with http_server("demo", tmp_path, "--kv-memory", "16MiB", *flags) as server:
        url = f"http://{server.target.host}:{server.target.port}/v1/embeddings"
        answer = httpx.post(url, json={"input": TEXTS}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    found = torch.tensor([row["embedding"] for row in answer.json()["data"]])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("flags", [("--isolate-model",), ("--replicas", "2")], ids=" ".join)
def test_an_encoder_gives_the_same_wherever_it_computes(flags: tuple[str, ...], tmp_path: Path) -> None:
    folder = make_encoder("modernbert", tmp_path / "model")
    texts = ["Hello", "ships and the sea " * 5]
    with LLM(str(folder), warm_up=False) as llm:
        wanted = torch.tensor(llm.embed(texts, use_tqdm=False))
    with http_server(str(folder), tmp_path, *flags) as server:
        url = f"http://{server.target.host}:{server.target.port}/v1/embeddings"
        answer = httpx.post(url, json={"input": texts}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    found = torch.tensor([row["embedding"] for row in answer.json()["data"]])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
