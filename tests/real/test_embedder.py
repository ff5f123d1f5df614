"""Tests that a real embedding model gives the same vectors as transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from bridle import LLM
from tests.real.material import EMBEDDER, model_path, num_threads
from tests.real.texts import PAGES, PROMPTS

pytestmark = pytest.mark.slow

TEXTS = [*PROMPTS, *PAGES, "A cat sits on a mat.", "On the mat there is a cat.", "Interest rates rose again."]


@torch.inference_mode()
def test_vectors_are_those_of_transformers() -> None:
    folder = str(model_path(EMBEDDER))
    torch.set_num_threads(num_threads())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    want = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))  # [N, D]
    with LLM(folder, num_threads=num_threads()) as llm:
        have = torch.tensor(llm.embed(TEXTS))
    assert float((have * want).sum(-1).min()) > 0.9999
    cat, mat, rates = have[-3:]
    assert float(cat @ mat) > 0.7 > 0.3 > float(cat @ rates)
