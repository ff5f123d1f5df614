"""Tests of the real clients of OpenAI, Cohere and huggingface_hub with models for embeddings, classification and
ranking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from tests.http.harness import served
from tests.http.pooling_models import embedder, loaded, ranker, sorter
from tests.real_clients.environment import foreign_python, run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = ("huggingface_hub==0.36.2", "numpy")
HERE = Path(__file__).parent
SCRIPT, RERANK = HERE / "script_pooled.py", HERE / "script_rerank.py"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    """Serve an embedding model, a classifier and a cross-encoder."""
    with ExitStack() as stack:
        yield [stack.enter_context(served(loaded(folder()))) for folder in (embedder, sorter, ranker)]


def test_the_hubs_client(servers: list[str]) -> None:
    printed = run_script(foreign_python(*PACKAGES), SCRIPT, *servers)
    assert printed.count(" ok\n") == SCRIPT.read_text().count("\ndef check_") > 0


def test_coheres_client_ranks(servers: list[str]) -> None:
    embeds, _, ranks = servers
    printed = run_script(foreign_python("cohere==7.3.1"), RERANK, ranks, embeds)
    assert printed.count(" ok\n") == RERANK.read_text().count("\ndef check_") > 0


def test_openais_client_cuts_vectors(servers: list[str]) -> None:
    with openai.OpenAI(base_url=servers[0] + "/v1", api_key="none", max_retries=0) as client:
        texts = ["Bears eat honey", "Paris"]
        whole, part = (
            [row.embedding for row in client.embeddings.create(model="embedder", input=texts, dimensions=n).data]
            for n in (16, 4)
        )
        for long, short in zip(whole, part, strict=True):
            length = math.hypot(*long[:4])
            assert short == pytest.approx([value / length for value in long[:4]], abs=1e-5)
        with pytest.raises(openai.BadRequestError, match="must be from 1 to 16"):
            client.embeddings.create(model="embedder", input="a", dimensions=17)
        with pytest.raises(openai.BadRequestError, match="generates no text"):
            client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "Hello"}])
