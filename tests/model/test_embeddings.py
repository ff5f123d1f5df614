"""Tests that embedding vectors of real models are transformers' last hidden states, scaled to length 1."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from bridle.llm import LLM
from tests.fakes.tiny_checkpoints import cached_checkpoint

_SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("gemma2", "opt")]


@pytest.mark.parametrize("family", ["llama", "gpt2", *_SLOW])
def test_vectors_are_the_librarys_hidden_states(family: str) -> None:
    """Texts are computed in one step or in many, by fused layers or by transformers', beside other texts."""
    folder = cached_checkpoint(family)
    texts = [[5, 6, 7, 8], [9], list(range(20, 60)), [5, 6, 7, 8, 11]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, -1] for text in texts]
    with LLM(str(folder), kv_memory=1 << 20, max_num_batched_tokens=7) as llm:
        found = llm.embed(texts, use_tqdm=False)
    for vector, state in zip(found, states, strict=True):
        want = state / state.norm()
        assert math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5)
        torch.testing.assert_close(torch.tensor(vector), want, rtol=1e-3, atol=1e-4)
