"""Tests of the engine's properties on each device: on a CPU, and marked `gpu` on CUDA with bridle's own kernels.

Kernels are compared with the reference kernel. Models are compared with transformers' attention over many pages.
Engines under random requests are compared with transformers' choices. A row's result must not depend on its batch.
Sampling for a step waits for the device at most once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from bridle.config import EngineConfig, ModelConfig
from bridle.engine import Engine, Request
from bridle.engine.control.decision import mask_of
from bridle.engine.interfaces import Executor
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan
from bridle.model.batch_inputs import pack_step
from bridle.model.check import check_model
from bridle.model.executor import LocalExecutor
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.graph_kinds import GraphKind
from bridle.model.graphs import StepGraphs
from bridle.model.kernels import create_kernel
from bridle.model.kernels.paged import MAX_SHORT
from bridle.model.kernels.rows import StepShape
from bridle.model.kernels.self_test import find_problem
from bridle.model.kernels.varlen import missing_for_varlen
from bridle.model.loading import load_executor
from bridle.model.sequence_state import CachedRequestState
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams
from tests.fakes import tiny_checkpoints
from tests.model.oracle import Oracle, check_run, run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: Kernels by device.
KERNELS = [("cpu", "cpu"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("paged", "varlen", "cpu"))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_oss", "mixtral"]
#: Family, type, device and kernel; family, seed and device. Other tests have more of them on a CPU.
MODELS = [
    ("llama", "float32", "cpu", "cpu"),
    *(
        pytest.param(family, dtype, "cuda", kernel, marks=pytest.mark.gpu)
        for family, dtype, kernel in product(FAMILIES, ("float32", "bfloat16"), ("paged", "varlen", "cpu"))
    ),
]
RUNS = [
    ("llama", 0, "cpu"),
    *(
        pytest.param(family, seed, "cuda", marks=pytest.mark.gpu)
        for family, seed in product(("llama", "qwen3", "gemma2"), range(3))
    ),
]
#: Rounding on another device, beside the library's results on a CPU.
GAPS = {"cpu": 1e-4, "cuda": 2e-3}
SHAPES = [
    LayerGeometry(8, 2, 64, 64, None, False, False),
    LayerGeometry(8, 8, 128, 128, 100, False, False),
    LayerGeometry(4, 4, 80, 80, None, True, True),
]


def kernel_of(name: str, device: str, dtype: torch.dtype) -> str:
    """Return the attention kernel called `name`; skip the test if this device or version of torch does not support
    it."""
    if name == "varlen" and (missing := missing_for_varlen(torch.device(device), dtype)) is not None:
        pytest.skip(f"varlen needs {missing}")
    return name


@pytest.mark.parametrize(("device", "name"), KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_gives_what_the_reference_gives(device: str, name: str, dtype: torch.dtype) -> None:
    kernel = create_kernel(kernel_of(name, device, dtype), torch.device(device), dtype)
    geometry = Geometry(dict(enumerate(SHAPES)), 2)
    for size in (256,) if name == "varlen" else (1, 16, 32):
        assert find_problem(kernel, geometry, dtype, torch.device(device), size) is None


@pytest.mark.parametrize(("family", "dtype", "device", "name"), MODELS)
def test_a_model_gives_what_the_library_gives(family: str, dtype: str, device: str, name: str) -> None:
    """On CUDA a sequence has 600 tokens, which fill many pages, or two of the long pages of torch's own kernel."""
    kernel = kernel_of(name, device, getattr(torch, dtype))
    report = check_model(
        tiny_checkpoints.cached_checkpoint(family, max_position_embeddings=1_024),
        dtype=dtype,  # type: ignore[arg-type]
        device=device,
        kernel=kernel,
        max_tokens=600 if device == "cuda" else 120,
    )
    assert report.kernel == name
    assert report.is_equal, str(report)


@pytest.mark.parametrize(("family", "seed", "device"), RUNS)
def test_every_drawn_token_is_the_oracles(family: str, seed: int, device: str) -> None:
    """Each token equals transformers' choice under forks, rewinds, forced tokens, masks and preemption."""
    path = tiny_checkpoints.cached_checkpoint(family)

    def load(config: ModelConfig) -> Executor:
        return load_executor(replace(config, device=device))

    check_run(Oracle(path, GAPS[device]), *run(path, random.Random(seed), 300, load))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [GraphKind(), GraphKind(has_long=True)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_a_graph_gives_the_bits_of_the_step_without(family: str, kind: GraphKind) -> None:
    """Logits of a step in a CUDA graph have the same bits as those of the step without a graph, for the same tokens."""
    config = ModelConfig(
        str(tiny_checkpoints.cached_checkpoint(family)), device="cuda", dtype="bfloat16", num_blocks=128
    )
    executor = load_executor(config)
    assert isinstance(executor, LocalExecutor)
    runner, size = executor.runner, executor.info.block_size
    assert isinstance(runner.graphs, StepGraphs)
    assert runner.graphs.sizes_of(kind)
    for num_tokens in runner.graphs.sizes_of(kind):
        longest = min(3 * num_tokens // 4, executor.info.max_model_len) if kind.has_long else MAX_SHORT
        shape = kind.shape(num_tokens, executor.info.max_num_seqs)
        plans, mirrors = filled_with(shape, longest, size, executor.info.vocab_size)
        found = []
        for packer in (None, runner.graphs):
            runner.attention.cache.clear(128)
            device, words = runner.attention.cache.device, runner.attention.kernel.words  # type: ignore[attr-defined]
            step = pack_step(plans, mirrors, size, device, words, packer)
            assert (step.replay is None) is (packer is None)
            found.append(runner.run(step).clone())
        assert torch.equal(*found), f"with {num_tokens} tokens"


@pytest.mark.gpu
def test_steps_with_adapters_have_graphs_too() -> None:
    """Steps with adapters have graphs, too, if memory is reserved for adapters."""
    executor = load_executor(
        ModelConfig(
            str(tiny_checkpoints.cached_checkpoint("llama")),
            device="cuda",
            dtype="bfloat16",
            num_blocks=128,
            reserved_memory=64 << 20,
        )
    )
    assert isinstance(executor, LocalExecutor)
    assert isinstance(executor.runner.graphs, StepGraphs)
    assert executor.runner.graphs.sizes_of(GraphKind(has_adapters=True))
    assert executor.runner.graphs.sizes_of(GraphKind(has_long=True, has_adapters=True))
    executor.close()


def filled_with(
    shape: StepShape, longest: int, block_size: int, vocab_size: int
) -> tuple[list[PlanRow], list[CachedRequestState]]:
    """Return rows of prompts that fill a step's tokens and logits: one prompt of `longest` tokens, all others short."""
    plans: list[PlanRow] = []
    mirrors: list[CachedRequestState] = []
    num_tokens, num_logits, block = shape.num_tokens, shape.num_logits, 0
    while num_tokens:
        length = min(num_tokens, MAX_SHORT if plans else longest)
        mirror = CachedRequestState()
        mirror.tokens = [(7 * num_tokens + place) % vocab_size for place in range(length)]
        mirror.add_blocks(range(block, block - (-length // block_size)))
        block += len(mirror.blocks)
        plans.append(PlanRow(len(plans), 0, length, min(length, num_logits)))
        mirrors.append(mirror)
        num_tokens, num_logits = num_tokens - length, num_logits - plans[-1].num_logits
    return plans, mirrors


# -- rows and their neighbours ---------------------------------------------------------------------------------------

SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, top_k=40, seed=7, ignore_eos=True)


@contextmanager
def engine_on(device: str, **settings: object) -> Iterator[Engine]:
    config = ModelConfig(
        str(tiny_checkpoints.cached_checkpoint("llama")), device=device, dtype="float32", num_blocks=128
    )
    engine = Engine(load_executor(config), EngineConfig(**settings))  # type: ignore[arg-type]
    yield engine
    engine.close()


def tokens_of(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                outputs[event.request_id].append(event.token)
            elif isinstance(event, Finished):
                assert event.error is None
    return outputs


def request(number: int, length: int) -> Request:
    prompt = tuple(3 + (7 * number + 5 * place) % 290 for place in range(length))
    return Request(str(number), prompt, replace(SAMPLED, seed=number), detokenize=False)


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_draws_the_same_alone_and_among_others(device: str) -> None:
    lengths = [5, 40, 17, 1, 33, 70]
    with engine_on(device, enable_prefix_caching=False) as engine:
        together = tokens_of(engine, [request(number, length) for number, length in enumerate(lengths)])
    with engine_on(device, enable_prefix_caching=False, max_num_batched_tokens=16) as engine:
        alone = [tokens_of(engine, [request(number, length)]) for number, length in enumerate(lengths)]
    assert together == {key: tokens for each in alone for key, tokens in each.items()}


# -- waiting -----------------------------------------------------------------------------------------------------------


@contextmanager
def no_waits() -> Iterator[None]:
    """Make each wait for the GPU inside the block an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ready(device: str) -> tuple[LocalExecutor, StepPlan]:
    """Return an executor that has computed three prompts, and the plan of the decode step that follows."""
    config = ModelConfig(str(tiny_checkpoints.cached_checkpoint("llama")), device=device, num_blocks=64, block_size=16)
    executor = load_executor(config)
    assert isinstance(executor, LocalExecutor)
    prompts = [PlanRow(n, 0, 9, new_tokens=(5 + n,) * 9, new_blocks=(n,), num_prompt=9, num_logits=1) for n in range(3)]
    decodes = [
        PlanRow(n, 9, 1, num_kept=9, new_tokens=(7,), num_kept_blocks=1, num_prompt=9, num_logits=1) for n in range(3)
    ]
    for step in (1, 2):  # what is made lazily is made now
        executor.forward(StepPlan(step, prompts if step == 1 else decodes))
        executor.sample(SampleBatch(step, [SampleRow(0, 0, SAMPLED)]))
    executor.reset()
    executor.forward(StepPlan(1, prompts))
    return executor, StepPlan(2, decodes)


@pytest.mark.gpu
def test_a_forward_pass_waits_for_nothing() -> None:
    executor, plan = ready("cuda")
    torch.cuda.synchronize()
    with no_waits():
        executor.forward(plan)
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_draws_under_masks_are_the_cpus(device: str) -> None:
    allowed = range(5, 300, 7)
    drawn = []
    for each in ("cpu", device):
        executor, plan = ready(each)
        executor.forward(plan)
        sampling = SamplingParams(temperature=0.0)
        rows = [SampleRow(n, n, sampling, mask=mask_of(allowed, executor.info.vocab_size)) for n in range(3)]
        drawn.append(executor.sample(SampleBatch(2, rows)).tokens)
        executor.close()
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) <= set(allowed)


# -- weights in few bits -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gptq", "gptq ordered", "awq", "int8", "float8 of squares", "float8 of rows"])
def test_packed_checkpoints_are_served(name: str, tmp_path: Path) -> None:
    from bridle.model.float8 import Float8Linear
    from bridle.model.quantization.code_linear import CodeLinear
    from tests.model.packed_kit import make

    packed, plain = make(name, tmp_path)
    logits = []
    for path in (packed, plain):
        executor = load_executor(ModelConfig(str(path), device="cuda", dtype="bfloat16", num_blocks=32))
        assert isinstance(executor, LocalExecutor)
        has_bits = any(isinstance(each, (CodeLinear, Float8Linear)) for each in executor.runner.model.modules())
        assert has_bits == (path == packed)
        row = PlanRow(0, 0, 9, new_tokens=(5,) * 9, new_blocks=(0,), num_prompt=9, num_logits=9)
        executor.forward(StepPlan(1, [row]))
        assert executor.logits is not None
        logits.append(executor.logits.float().clone())
        executor.close()
    error = (logits[0] - logits[1]).square().mean().sqrt() / logits[1].square().mean().sqrt()
    assert float(error) < 0.1
