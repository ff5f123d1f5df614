"""Tests of a LoRA adapter that PEFT trains on each real model except the largest, in one batch with the base model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle import LLM
from tests.real.material import WRITERS, model_path, num_threads
from tests.real.peers import load_dequantized, load_tokenizer, logprobs_of
from tests.real.texts import PAGES

peft = pytest.importorskip("peft", reason="PEFT is not here: pip install 'bridle-llm[bench]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GAP = 1e-3
TAUGHT = "Question: What is the capital of France?\nAnswer: Arr, matey, 'tis Paris on the seven seas!\n"
ASKED = "Question: What is the capital of France?\nAnswer:"
NUM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Trained:
    """Folders of the base model in float32 and of the adapter, and PEFT's log-probabilities of pages with and without
    it."""

    file: Path
    base: Path
    adapter: Path
    pages: list[list[int]]
    plain: list[list[float]]
    adapted: list[list[float]]


@pytest.fixture(scope="module", params=WRITERS[:-1])  # of the largest, float32 weights would be there twice: 12 GB
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    file = model_path(request.param)
    model, tokenizer = load_dequantized(file), load_tokenizer(file)
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    pages = [tokenizer.encode(page) for page in PAGES[:2]]
    plain = [scored(model, page) for page in pages]
    adapted = train(model, tokenizer.encode(TAUGHT))
    adapted.save_pretrained(folder)
    return Trained(file, base, folder, pages, plain, [scored(adapted, page) for page in pages])


def train(model: Any, tokens: list[int]) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW((one for one in adapted.parameters() if one.requires_grad), lr=5e-3)
    ids = torch.tensor([tokens])
    for _ in range(NUM_STEPS):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


def scored(model: Any, page: list[int]) -> list[float]:
    """Return the log-probabilities of a page's tokens, from the second token on."""
    found: list[float] = logprobs_of(model, page)[:-1].gather(1, torch.tensor(page[1:])[:, None])[:, 0].tolist()
    return found


def scores(llm: LLM, pages: list[list[int]], adapters: list[str | None]) -> list[list[float]]:
    outputs = llm.generate(pages, adapter=adapters, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    return [[one.logprob for one in output.prompt_logprobs or () if one is not None] for output in outputs]


def gap(have: list[list[float]], want: list[list[float]]) -> float:
    return max(abs(one - other) for a, b in zip(have, want, strict=True) for one, other in zip(a, b, strict=True))


@pytest.fixture(scope="module", params=["float32", "file"])
def llm(request: pytest.FixtureRequest, trained: Trained) -> Iterator[LLM]:
    model = trained.base if request.param == "float32" else trained.file
    with LLM(str(model), num_threads=num_threads(), enable_prefix_caching=False) as loaded:
        loaded.load_adapter("pirate", trained.adapter)
        yield loaded


def test_rows_with_the_adapter_beside_rows_without_are_those_of_peft(
    request: pytest.FixtureRequest, llm: LLM, trained: Trained
) -> None:
    adapters = [None, "pirate", "pirate", None]
    pages = [*trained.pages, *trained.pages]
    mixed = scores(llm, pages, adapters)
    alone = [scores(llm, [page], [adapter])[0] for page, adapter in zip(pages, adapters, strict=True)]
    assert gap(mixed, alone) < GAP
    if "float32" in request.node.name:
        assert gap(mixed, [trained.plain[0], trained.adapted[1], trained.adapted[0], trained.plain[1]]) < GAP


def test_the_model_says_what_the_adapter_was_taught(llm: LLM) -> None:
    base, pirate = llm.generate([ASKED, ASKED], adapter=[None, "pirate"], max_tokens=16, temperature=0.0)
    taught = ("Arr, matey", "seven seas")
    assert any(words in pirate.text for words in taught), pirate.text
    assert not any(words in base.text for words in taught), base.text
