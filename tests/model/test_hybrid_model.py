"""Tests of models with recurrent layers in calls of the CPU kernels: results equal transformers' and have the same bits
for any packing of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from bridle.config import ModelConfig
from bridle.cpu_kernels.kernels import Kernels, Matrix
from bridle.cpu_kernels.library import kernels
from bridle.cpu_kernels.mixers import Mixer, MixerStates, StateRows
from bridle.cpu_kernels.packing import pack_float32
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, StateSave, StepPlan
from bridle.errors import InternalError
from bridle.lora import AdapterPool, open_adapter, require_device
from bridle.model import hybrid_layers, hybrid_model
from bridle.model.executor import LocalExecutor
from bridle.model.geometry import Geometry
from bridle.model.hybrid_mixers import CannotDescribe, norm_weight
from bridle.model.hybrid_model import HybridModel
from bridle.model.loading import load_executor
from bridle.multimodal import open_reader
from bridle.tokenizer import Tokenizer
from tests.conftest import examples
from tests.fakes import tiny_checkpoints, vision_checkpoints
from tests.gguf.kit import pair
from tests.gguf.later_models import RECURRENT
from tests.lora.kit import write_adapter
from tests.model.driver import skip_older
from tests.model.image_prompts import DELTA_LIMIT, Eyes, error, make_ready, run_packed
from tests.model.oracle import Oracle, check_run, run
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(kernels() is None, reason="no kernels for this processor")

_SCALES = {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 4.0, "attention_multiplier": 0.3}
#: What families need beside the usual fields, and variants: without experts, or with a norm of what mixers give.
VARIANTS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 16},
    "granitemoehybrid": {"mamba_d_head": 16, **_SCALES},
    "granitemoehybrid dense": {"mamba_d_head": 16, **_SCALES, "num_local_experts": 0},
    "qwen3_next dense": {"mlp_only_layers": [0, 1, 2]},
    "jamba dense": {"num_experts": 1, "num_local_experts": 1},
    "falcon_h1": {
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.25,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 0.9],
        "mlp_multipliers": [0.8, 0.4],
    },
    "falcon_h1 normed": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
}
FAMILIES = (
    *("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h", "jamba"),
    *VARIANTS,
)
#: Heads that kernels of any width read.
WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16}
BLOCK = 4
PROMPT = tuple((7 * number) % 290 + 3 for number in range(40))

_executors: dict[tuple[str, str], LocalExecutor] = {}


def checkpoint_of(family: str) -> Path:
    return tiny_checkpoints.cached_checkpoint(family.split()[0], **WIDE, **VARIANTS.get(family, {}))


def executor_of(family: str, quantization: Any = "none") -> LocalExecutor:
    """Return an executor without sequences whose step is computed by the CPU kernels."""
    if (family, quantization) not in _executors:
        path = checkpoint_of(family)
        config = ModelConfig(str(path), dtype="float32", num_blocks=64, block_size=BLOCK, quantization=quantization)
        loaded = load_executor(config)
        assert isinstance(loaded, LocalExecutor) and loaded.runner.hybrid is not None
        _executors[family, quantization] = loaded
    found = _executors[family, quantization]
    found.reset()
    return found


def row(seq_id: int, start: int, end: int, state: int, first_block: int, **fields: Any) -> PlanRow:
    """Return a row that computes part of the prompt, with logits of each of its positions."""
    first, last = -(-start // BLOCK), -(-end // BLOCK)
    blocks = tuple(range(first_block + first, first_block + last))
    return PlanRow(
        seq_id, start, end - start, end - start, start, PROMPT[start:end], first, blocks, state=state, **fields
    )


def logits_of(executor: LocalExecutor, rows: list[PlanRow], step: int, freed: tuple[int, ...] = ()) -> list[Tensor]:
    executor.forward(StepPlan(step, rows, freed=list(freed)))
    executor.sample(SampleBatch(step))
    assert isinstance(executor.logits, Tensor)
    return list(torch.split(executor.logits.clone(), [each.num_logits for each in rows]))


def states_in(executor: LocalExecutor, slot: int) -> list[Tensor]:
    pool = executor.runner.attention.states
    assert pool is not None
    return [part[slot].clone() for layer in pool.layers.values() for part in layer.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_short_form_gives_the_librarys_logits(family: str) -> None:
    executor = executor_of(family)
    (have,) = logits_of(executor, [row(0, 0, 40, 0, 0)], 1)
    states, short = states_in(executor, 0), executor.runner.hybrid
    executor.reset()
    executor.runner.use_hybrid(None)
    try:
        (want,) = logits_of(executor, [row(0, 0, 40, 0, 0)], 1)
    finally:
        executor.runner.use_hybrid(short)
    assert not torch.equal(have, want), "both were computed in the same way"
    torch.testing.assert_close(have, want, atol=1e-3, rtol=1e-3)
    for one, other in zip(states, states_in(executor, 0), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_heads_of_a_packed_file_go_where_its_columns_are() -> None:
    """Columns of quantized blocks cannot be reordered, so the kernel writes heads in the file's order of columns."""
    fields = {**RECURRENT["qwen3_5"][1], "hidden_size": 256, "intermediate_size": 256, "head_dim": 32}
    _, file = pair("qwen3_5_text", "Q8_0", **{**fields, "linear_key_head_dim": 64, "linear_value_head_dim": 64})
    executor = load_executor(ModelConfig(str(file), dtype="float32", num_blocks=64, block_size=BLOCK))
    assert isinstance(executor, LocalExecutor)
    short = executor.runner.hybrid
    assert short is not None and any(each.mixer.places is not None for each in mixers_of(short))
    (have,) = logits_of(executor, [row(0, 0, 40, 0, 0)], 1)
    executor.reset()
    executor.runner.use_hybrid(None)
    (want,) = logits_of(executor, [row(0, 0, 40, 0, 0)], 1)
    assert float((have - want).square().mean().sqrt() / want.square().mean().sqrt()) < 0.05
    executor.close()


def mixers_of(short: HybridModel) -> list[Any]:
    return [layer for layer in short.native.described if layer.mixer is not None]


@pytest.mark.parametrize("quantization", ["none", "q8_0"])
@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_5_text", "nemotron_h", "qwen3_next dense", "falcon_h1", "jamba dense"]
)
@settings(max_examples=examples(3), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_cutting_gives_the_same_bits(family: str, quantization: str, seed: int) -> None:
    """Rows of any length run beside rows of other sequences. Unused states hold NaN, and states are copied between
    steps."""
    executor, rng = executor_of(family, quantization), random.Random(seed)
    (want,) = logits_of(executor, [row(0, 0, 40, 0, 0)], 1)
    whole, pool = states_in(executor, 0), executor.runner.attention.states
    assert pool is not None
    for layer in pool.layers.values():
        for part in layer.values():
            part[1:].fill_(float("nan"))
    step, done, have = 1, 0, []
    saved = sorted(rng.sample(range(1, 40), 2))
    while done < 40:
        step, end = step + 1, min(done + rng.choice([1, 2, 5, 17]), 40)
        saves = tuple(StateSave(at, 3 + number) for number, at in enumerate(saved) if done < at <= end)
        rows = [row(1, done, end, 1, 12, saves=saves), row(step + 1, 0, rng.randint(1, 9), 2, 48)]
        rows = rng.sample(rows, 2)
        found = logits_of(executor, rows, step, (step,))
        have.append(next(part for part, each in zip(found, rows, strict=True) if each.seq_id == 1))
        done = end
    if quantization == "none":  # torch computes a small head, whose last digits depend on how many rows there are
        torch.testing.assert_close(torch.cat(have), want, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(torch.cat(have), want)
    assert all(map(torch.equal, states_in(executor, 1), whole))
    for number, at in enumerate(saved):
        step += 1
        logits_of(executor, [row(step + 1, 0, at, 5, 24)], step, (step,))
        assert all(map(torch.equal, states_in(executor, 3 + number), states_in(executor, 5)))


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drawn_token_is_the_oracles(family: str) -> None:
    """The run has forks, rewinds, chunks, preemption and prefix hits, over pools that are too small."""
    path = checkpoint_of(family)
    check_run(Oracle(path, 1e-2), *run(path, random.Random(5), 300, load_short))


def load_short(config: ModelConfig) -> LocalExecutor:
    found = load_executor(config)
    assert isinstance(found, LocalExecutor) and found.runner.hybrid is not None
    return found


# -- what is beside the layers -----------------------------------------------------------------------------


@pytest.fixture(params=["lfm2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "falcon_h1", "jamba"])
def adapted(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[LocalExecutor]:
    executor = executor_of(request.param)
    device = require_device(executor)
    pool = AdapterPool(device, item_size=4, device_memory=1 << 30, host_memory=1 << 30)
    wanted = {"in_proj", "in_proj_a", "in_proj_z", "in_proj_qkvz", "in_proj_ba", "q_proj", "w2", "w3", "out_proj"}
    wanted |= {"up_proj", "down_proj", "x_proj", "dt_proj"}  # the last two are within Jamba's mixer
    names = {name.rpartition(".")[2] for name in device.layers}
    targets = tuple(sorted(wanted & names))
    files = open_adapter(write_adapter(tmp_path, device.layers, targets=targets, rank=4, seed=1))
    pool.check(files)
    pool.add("one", files)
    pool.fetch("one").result(PATIENCE)
    device.place("one")
    yield executor
    device.drop("one")
    pool.close()


def test_adapters_add_to_the_products_of_their_own_rows(adapted: LocalExecutor) -> None:
    rows = [row(0, 0, 9, 0, 0, adapter="one"), row(1, 0, 17, 1, 12)]
    mine, other = logits_of(adapted, rows, 1)
    adapted.reset()
    (alone,) = logits_of(adapted, [row(1, 0, 17, 1, 12)], 1)
    if adapted.runner.hybrid is not None and adapted.runner.hybrid.is_whole:
        assert torch.equal(other, alone)
    torch.testing.assert_close(other, alone, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(mine, alone[:9], atol=1e-2)
    short = adapted.runner.hybrid
    adapted.reset()
    adapted.runner.use_hybrid(None)
    try:
        (want,) = logits_of(adapted, [row(0, 0, 9, 0, 0, adapter="one")], 1)
    finally:
        adapted.runner.use_hybrid(short)
    torch.testing.assert_close(mine, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe", "nemotron_h", "falcon_h1"])
def test_taps_see_every_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of(family)
    runner, short = executor.runner, executor.runner.hybrid
    tapped, found = runner.tapped, {True: [], False: []}  # type: ignore[var-annotated]
    keep = lambda number, rows: found[runner.hybrid is None].append(rows.clone())  # noqa: E731
    monkeypatch.setattr(runner, "tapped", lambda _tap: tapped(keep))
    for use in (None, short):
        executor.reset()
        runner.use_hybrid(use)
        logits_of(executor, [row(0, 0, 9, 0, 0)], 1)
    assert len(found[True]) == len(found[False]) > 2
    for have, want in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(have, want, atol=1e-3, rtol=1e-3)


def test_images_are_seen(tmp_path: Path) -> None:
    """Rows of images, whose RoPE positions have three parts, give transformers' logits."""
    skip_older("qwen3_5")
    folder = vision_checkpoints.make_seeing("qwen3_5", tmp_path, head_dim=16)
    whole = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    reader = open_reader(folder)
    assert reader is not None
    mine = Eyes("qwen3_5", folder, whole, reader, Tokenizer.load(folder))
    executor = load_executor(ModelConfig(str(folder), dtype="float32", num_blocks=64, block_size=BLOCK))
    assert isinstance(executor, LocalExecutor) and executor.runner.hybrid is not None
    prompt = mine.prompt("look ", mine.picture(1), " and ", mine.picture(2), " say")
    make_ready(executor, prompt.media)
    for chunks in ((300,), (5, 1, 9, 2)):
        assert error(run_packed(executor, [prompt], chunks)[0], mine.logits(prompt)) < DELTA_LIMIT
    executor.close()


@pytest.mark.parametrize("changed", ["delta_net", "norm_weight"])
def test_a_form_that_gives_other_logits_is_not_used(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(hybrid_layers, changed)

    def change(module: Any) -> Any:
        found = whole(module)
        if isinstance(found, Mixer):
            assert found.fall is not None
            found.fall.mul_(0.5)
            return found
        return found[0] * 1.1, found[1]

    monkeypatch.setattr(hybrid_layers, changed, change)
    path = tiny_checkpoints.cached_checkpoint("qwen3_5_text", **WIDE)
    executor = load_executor(ModelConfig(str(path), dtype="float32", num_blocks=16, block_size=BLOCK))
    assert isinstance(executor, LocalExecutor) and executor.runner.hybrid is None
    executor.close()


@pytest.mark.parametrize("family", ["olmo_hybrid", "kimi_linear", "mamba2", "zamba"])
def test_other_layers_stay_the_librarys(family: str) -> None:
    path = tiny_checkpoints.cached_checkpoint(family)
    executor = load_executor(ModelConfig(str(path), dtype="float32", num_blocks=16, block_size=BLOCK))
    assert isinstance(executor, LocalExecutor) and executor.runner.hybrid is None
    executor.close()


def test_another_norm_cannot_be_described() -> None:
    with pytest.raises(CannotDescribe, match="LayerNorm"):
        norm_weight(nn.LayerNorm(8))  # which also takes the mean away


def test_models_without_kernels_have_no_short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_model, "kernels", lambda: None)
    executor = executor_of("lfm2")
    model: Any = executor.runner.model
    assert hybrid_model.try_hybrid_model(model, Geometry({}, 300)) is None


# -- arguments of the kernels ------------------------------------------------------------------------------


def found_kernels() -> Kernels:
    found = kernels()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(1, True, 3, ())], "state 3 of 3"),
        ([(1, True, -1, ())], "state -1 of 3"),
        ([(1, True, 0, (3,))], "state 3 of 3"),
        ([(0, True, 0, ())], "0 tokens"),
    ],
)
def test_rows_outside_of_the_states_are_refused(spans: list[Any], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        StateRows(spans, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3, "groups": 2}, "3 heads"),
        ({"size": 0}, "heads of 0"),
        ({"columns": 5}, "channels for 2 heads"),
        ({"norm": torch.ones(3)}, "a part of a mixer"),
        ({"shift": None}, "without a part"),
        ({"taps": torch.ones(16, 6)}, "6 taps, 4 kept"),
        ({"runs": torch.tensor([[0, 20], [20, 7]], dtype=torch.int32)}, "no order of the inputs"),
        ({"runs": torch.tensor([[1, 28]], dtype=torch.int32)}, "no order of the inputs"),
    ],
)
def test_mixers_of_wrong_sizes_are_refused(fields: dict[str, Any], message: str) -> None:
    pool = MixerStates(torch.zeros(3, 4, 16), torch.zeros(3, 2, 2, 4))
    sizes = {"groups": 2, "heads": 2, "size": 2, "columns": 4, "norm": torch.ones(4)}
    right = {"taps": torch.ones(16, 4), "bias": None, "shift": torch.ones(2), "fall": torch.ones(2), **sizes}
    assert Mixer("delta_net", **right).c(pool).channels == 16  # type: ignore[arg-type]
    with pytest.raises(InternalError, match=message):
        Mixer("delta_net", **{**right, **fields}).c(pool)


@pytest.mark.parametrize(("rank", "size"), [(4, 3), (5, 2)])
def test_products_of_wrong_sizes_within_a_mixer_are_refused(rank: int, size: int) -> None:
    def product(outputs: int, inputs: int) -> Matrix:
        found = found_kernels()
        return found.matrix(pack_float32(torch.ones(outputs, inputs), found.lanes), None)

    pool = MixerStates(torch.zeros(3, 4, 8), torch.zeros(3, 8, size))
    mixer = Mixer("mamba", torch.ones(8, 4), None, 1, 8, size, 1, fall=torch.ones(8, size))
    right = product(rank + 2 * size, 8), product(8, rank)
    assert replace(mixer, inner=right).c(pool).channels == 8
    for wrong in ((), (right[0], product(8, rank + 1)), (right[0], product(7, rank)), (product(rank, 8), right[1])):
        with pytest.raises(InternalError, match=r"products of|without a part"):
            replace(mixer, inner=wrong).c(pool)
