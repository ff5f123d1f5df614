"""Tests that llama.cpp and torch agree on a GGUF file: logits, samples, and generations with and without programs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("llama_cpp")

from bridle import LLM, SamplingParams
from bridle.config import ModelConfig
from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.gguf.writer import FILE_TYPES
from bridle.llamacpp import load_executor
from bridle.llamacpp.executor import LlamaExecutor
from tests.gguf.kit import ALIASES, ALL_FAMILIES, EXPERT_SIZES, PROMPT, load, logits, mxfp4_file, pair
from tests.gguf.later_models import EXPERTS, OLDER, RECURRENT
from tests.llamacpp.kit import prompt_plan, started
from tests.model.oracle import Oracle, check_run, run

#: llama.cpp takes GELU from a table of halves, and adds in another order.
GAP = 0.05


@pytest.mark.parametrize("family", [*ALL_FAMILIES, *ALIASES])
def test_logits_are_those_of_the_original(family: str) -> None:
    want = logits(load(pair(family)[0]))
    executor = started(family)
    executor.forward(prompt_plan(1, 0, PROMPT, len(PROMPT)))
    assert executor.logits is not None
    error = float((executor.logits - want).abs().max())
    has_gelu = family in ("gemma", "gemma2", "gemma3_text", "starcoder2", "phi")
    assert error <= (GAP if has_gelu else 1e-3)
    executor.close()


#: llama.cpp has sizes of the released Gemma 3n as constants, rotates all layers of Mellum by one base and neighbors in
#: heads of Hy4, and weighs experts of PhiMoE by another rule.
_LATER = sorted((EXPERTS | OLDER).keys() - {"gemma3n", "mellum", "hy_v4", "phimoe"})


@pytest.mark.parametrize("name", _LATER)
def test_logits_of_later_families_are_those_of_the_original(name: str) -> None:
    family, fields = (EXPERTS | OLDER)[name]
    original, file = pair(family, **fields)
    executor = load_executor(ModelConfig(str(file), backend="llamacpp", dtype="float32", num_blocks=32, num_threads=1))
    executor.forward(prompt_plan(1, 0, PROMPT, len(PROMPT)))
    assert executor.logits is not None
    error = float((executor.logits - logits(load(original))).abs().max())
    assert error <= (GAP if name in OLDER else 2e-3)  # they have GELU
    executor.close()


def test_logits_of_llama_3s_positions() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    original, file = pair("llama", rope_parameters=rope)
    executor = load_executor(ModelConfig(str(file), backend="llamacpp", dtype="float32", num_blocks=32, num_threads=1))
    executor.forward(prompt_plan(1, 0, PROMPT, len(PROMPT)))
    assert executor.logits is not None
    assert float((executor.logits - logits(load(original))).abs().max()) <= 1e-3
    executor.close()


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_type_that_is_written_gives_the_same_greedy_tokens(kind: str) -> None:
    """Greedy tokens of llama.cpp and torch are equal wherever the two largest logits differ by more than rounding."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    _, file = pair("llama", kind, **sizes)
    tokens = PROMPT * 4
    want = logits(load(file), tokens)  # [T, V]
    executor = load_executor(ModelConfig(str(file), backend="llamacpp", dtype="float32", num_blocks=32, num_threads=1))
    executor.forward(prompt_plan(1, 0, tokens, len(tokens)))
    have = executor.logits
    assert have is not None
    size = float(want.square().mean().sqrt())
    best = want.topk(2).values  # [T, 2]
    clear = best[:, 0] - best[:, 1] > size * {"F32": 0.001, "F16": 0.05, "BF16": 0.1}.get(kind, 0.5)
    assert int(clear.sum()) > len(tokens) // 10
    assert torch.equal(have.argmax(-1)[clear], want.argmax(-1)[clear])
    assert float((have - want).square().mean().sqrt()) < 0.05 * size
    executor.close()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mixtral", "Q4_K_M"),
        ("qwen3_moe", "Q8_0"),
        ("olmoe", "Q4_0"),
        ("gpt_oss", "Q8_0"),
        ("gpt_oss", "MXFP4"),
        ("glm4_moe", "Q8_0"),
        ("hunyuan_v1_moe", "Q8_0"),
        ("deepseek_v2", "Q8_0"),
        ("deepseek_v3", "Q4_K_M"),
    ],
)
def test_packed_experts_are_read_as_they_were_meant(family: str, kind: str) -> None:
    sizes = {**EXPERT_SIZES, "head_dim": 4} if "deepseek" in family else EXPERT_SIZES
    _, file = pair(family, "F32" if kind == "MXFP4" else kind, **sizes)
    if kind == "MXFP4":
        file = mxfp4_file(file)
    want = logits(load(file))
    executor = load_executor(ModelConfig(str(file), backend="llamacpp", dtype="float32", num_blocks=32, num_threads=1))
    executor.forward(prompt_plan(1, 0, PROMPT, len(PROMPT)))
    assert executor.logits is not None
    # Where two experts nearly tie, either may be taken: most rows are those of the other, to the types' precision.
    errors = (executor.logits - want).square().mean(-1).sqrt() / want.square().mean().sqrt()  # [T]
    assert float(errors.median()) < 0.05
    executor.close()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 10 or 1)
@given(seed=st.integers(0, 1 << 32))
def test_the_engine_draws_what_the_original_would(family: str, seed: int) -> None:
    """Each token of an engine over llama.cpp is transformers' choice, under programs, forks, rewinds, waits and
    preemption."""
    original, file = pair(family)

    def load_small(config: ModelConfig) -> LlamaExecutor:
        fields = {name: getattr(config, name) for name in ("model", "dtype", "num_blocks", "block_size")}
        return load_executor(ModelConfig(**fields, backend="llamacpp", num_threads=1))

    check_run(Oracle(original, GAP), *run(file, random.Random(seed), 300, load_small))


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "jamba", "mamba2"])
def test_recurrent_states_are_forked_and_rewound(name: str) -> None:
    """Each token is transformers' choice also for families with recurrent layers, whose states llama.cpp cannot
    truncate."""
    family, fields = RECURRENT[name]
    original, file = pair(family, **fields)

    def load_small(config: ModelConfig) -> LlamaExecutor:
        fields = {name: getattr(config, name) for name in ("model", "dtype", "num_blocks", "block_size")}
        return load_executor(ModelConfig(**fields, backend="llamacpp", num_threads=1))

    check_run(Oracle(original, GAP), *run(file, random.Random(3), 300, load_small))


def test_the_same_seeds_give_the_same_texts() -> None:
    """Both backends share one sampler, so equal seeds give equal texts with penalties, masks, several outputs and
    logprobs."""
    original, file = pair("qwen2")
    requests: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 5, "n": 3},
        {"temperature": 1.2, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logprobs": 3},
    ]
    with (
        LLM(str(original), num_blocks=64) as torch_llm,
        LLM(str(file), num_blocks=64, backend="llamacpp", dtype="float32", num_threads=1) as llama_llm,
    ):
        for fields in requests:
            sampling = SamplingParams(max_tokens=16, ignore_eos=True, **fields)
            want = torch_llm.generate(["the one in an", "x"], sampling)
            have = llama_llm.generate(["the one in an", "x"], sampling)
            assert [[one.token_ids for one in each.outputs] for each in have] == [
                [one.token_ids for one in each.outputs] for each in want
            ]
        constraint = {"regex": "(in|an|on) [0-9]{4}"}
        pattern = [llm.generate("the", SamplingParams(max_tokens=12, seed=1), constraint=constraint)[0].text
                   for llm in (torch_llm, llama_llm)]  # fmt: skip
        assert pattern[0] == pattern[1] and len(pattern[0]) == 7


def test_embeddings_are_those_of_torch() -> None:
    from bridle.model.loading import load_executor as load_into_torch

    original, _ = pair("llama")
    executor = started("llama")
    executor.forward(prompt_plan(1, 0, PROMPT, 2))
    executor.sample(_nothing(1))
    have = executor.embed(1, [1, 0])
    there = load_into_torch(ModelConfig(str(original), num_blocks=32, block_size=8))
    blocks = tuple(range(-(-len(PROMPT) // 8)))
    row = PlanRow(0, 0, len(PROMPT), 2, 0, tuple(PROMPT), 0, blocks, len(PROMPT))
    there.forward(StepPlan(1, [row]))
    want = there.embed(1, [1, 0])
    assert torch.allclose(torch.tensor(have), torch.tensor(want), atol=1e-4)
    executor.forward(StepPlan(2, [PlanRow(0, len(PROMPT), 1, 1, len(PROMPT), (7,), num_prompt=len(PROMPT))]))
    assert executor.logits is not None
    assert torch.allclose(executor.logits, logits(load(original), [*PROMPT, 7])[-1:], atol=1e-3)
    executor.close()


def _nothing(step: int) -> Any:
    from bridle.engine.scheduling.step_plan import SampleBatch

    return SampleBatch(step)
