"""Tests of the whole engine on real checkpoints: transformers' eager model must prefer every greedy token.

Random requests share prefixes, run in chunks next to each other's decodes, fork, and are preempted for lack of blocks.
Random programs steer some of them with forced tokens, rewinds, forks and waits. Each sampled token must be the best
allowed token of transformers' forward pass over the tokens that preceded it when it was sampled. A difference counts
only if transformers' two best logits are clearly apart."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.covering import slow_but
from tests.fakes import tiny_checkpoints
from tests.model.oracle import _oracle, check_run, run

#: One of each kind always runs: dense layers, windows and caps, learned positions, an offset of positions, experts,
#: sinks. `test_parity.py` compares one pass of every family.
KINDS = ("llama", "gemma2", "gpt2", "opt", "mixtral", "gpt_oss")
OTHERS = ("mistral", "qwen2", "qwen3", "gemma3_text", "phi", "phi3", "gpt_neox", "olmo2", "starcoder2", "stablelm",
          "qwen3_moe", "cohere")  # fmt: skip
FAMILIES = slow_but(KINDS, [*KINDS, *OTHERS])


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 10 or 1)
@given(seed=st.integers(0, 1 << 32))
def test_every_drawn_token_is_the_oracles(family: str, seed: int) -> None:
    path = tiny_checkpoints.cached_checkpoint(family)
    check_run(_oracle(family, path), *run(path, random.Random(seed), 300))
