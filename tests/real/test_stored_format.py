"""Tests of KV stored in 8 bits: how much a real model's next-token probabilities differ from those with exact KV."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bridle.config import ModelConfig
from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.kv_store.records import bytes_of
from bridle.model.executor import LocalExecutor
from bridle.model.loading import load_executor
from bridle.tokenizer import Tokenizer
from tests.real.material import WRITERS, model_path, num_threads
from tests.sources import ROOT

#: Tokens whose KV is stored, tokens that follow, and how many of these are computed at once.
STORED, FOLLOWING, STEP = 1024, 256, 8
BLOCK = 16


def distributions(executor: LocalExecutor, tokens: list[int], is_rounded: bool) -> Tensor:
    """Return the log-probabilities [FOLLOWING, V] after each of the tokens that follow the stored ones."""
    executor.reset()
    blocks = tuple(range(len(tokens) // BLOCK))
    size = len(tokens)
    executor.forward(StepPlan(1, [PlanRow(1, 0, STORED, 0, 0, tuple(tokens), new_blocks=blocks, num_prompt=size)]))
    stored = executor.int8_blocks
    assert stored is not None
    for block in range(STORED // BLOCK if is_rounded else 0):
        stored.write_block(block, memoryview(bytes_of(stored.read_block(block), stored.block_bytes)))
    found = []
    for number, start in enumerate(range(STORED, size, STEP)):
        row = PlanRow(1, start, STEP, STEP, size, num_kept_blocks=len(blocks), num_prompt=size)
        executor.forward(StepPlan(number + 2, [row]))
        assert isinstance(executor.logits, Tensor)
        found.append(executor.logits.float().log_softmax(-1))
    return torch.cat(found)


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_of_8_bits_is_what_the_page_states(name: str) -> None:
    path = str(model_path(name))
    executor = load_executor(ModelConfig(path, num_blocks=100, warm_up=False, num_threads=num_threads()))
    assert isinstance(executor, LocalExecutor)
    text = "".join((ROOT / "docs" / page).read_text() for page in ("parking.md", "lmtp.md", "controllers.md"))
    tokens = Tokenizer.load(path).encode(text)[: STORED + FOLLOWING]
    with torch.inference_mode():
        exact, rounded = (distributions(executor, tokens, is_rounded) for is_rounded in (False, True))
        divergence = (exact.exp() * (exact - rounded)).sum(-1)
    same = (exact.argmax(-1) == rounded.argmax(-1)).float().mean()
    stored, blocks = executor.int8_blocks, executor.kv_blocks
    assert stored is not None and blocks is not None
    size = stored.block_bytes / blocks.block_bytes
    print(f"{name}: {size:.1%} of the size, divergence {divergence.mean():.4f}, same likeliest token {same:.0%}")
    assert float(divergence.mean()) < 0.01
    assert float(same) > 0.9
    executor.close()
