"""Tests of properties of the kernels of fused layers in Triton's interpreter.

`test_fused_step.py` runs this file in a process of its own, where TRITON_INTERPRET is set before anything imports
Triton."""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import silu
from triton.runtime import interpreter

from bridle.engine.scheduling.step_plan import PlanRow
from bridle.lora.fused import is_interpreted
from bridle.model import fused_step, tensor_parallel
from bridle.model.attention import PagedAttention
from bridle.model.batch_inputs import pack_step
from bridle.model.check import check_model
from bridle.model.dense_layer import DenseLayer, HeadNorm, Norm, gelu_tanh
from bridle.model.dense_model import try_lower_model
from bridle.model.float8 import RoundedRows
from bridle.model.forward_context import attention_handler
from bridle.model.fused_step import FusedStep
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kernels import create_kernel
from bridle.model.kernels.cpu import CpuKernel
from bridle.model.kernels.reference import ReferenceKernel
from bridle.model.kv_cache import KVCache
from bridle.model.rope import Angles, angles_of
from bridle.model.sequence_state import CachedRequestState
from tests.fakes import tiny_checkpoints
from tests.model.attention_pool import CPU
from tests.model.paged_properties import watched
from tests.model.rank_threads import Ranks, part_of

assert is_interpreted(), "run this with TRITON_INTERPRET=1"

# What was not written is not a number, so that nobody can rely on it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
#: What one rounding explains, and what plain torch's several do.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
convert = interpreter._convert_float
STEP = FusedStep([], Norm(SimpleNamespace(weight=torch.ones(1), eps=1e-6)), CPU)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def to_even(given: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """Convert numbers to fewer bits with correct rounding, as GPUs and torch do. The interpreter's own conversion
    halves numbers whose rounding carries."""
    if input_dtype.name != "fp32" or output_dtype.name not in ("fp8e4nv", "bf16"):
        return convert(given, input_dtype, output_dtype, rounding_mode)
    is_small = output_dtype.name == "fp8e4nv"
    numbers = torch.from_numpy(np.ascontiguousarray(given, np.float32))
    made = numbers.to(torch.float8_e4m3fn if is_small else torch.bfloat16)
    return made.view(torch.uint8 if is_small else torch.uint16).numpy()


@patch.object(interpreter, "_convert_float", to_even)
@settings(max_examples=20)
@given(seed=st.integers(0, 99), size=st.sampled_from([16, 48, 200]), has_norm=st.booleans())
def test_rows_in_float8_are_those_that_are_rounded_afterwards(seed: int, size: int, has_norm: bool) -> None:
    """Rounding to float8 inside a kernel equals rounding its result, after a norm, after a gate and for a row of
    zeros."""
    rows, mixed = random(seed, 3, size).bfloat16(), random(seed + 1, 3, 2 * size).bfloat16()
    rows[1] = mixed[1] = 0
    norm = Norm(SimpleNamespace(weight=random(seed + 2, size).bfloat16(), eps=1e-6)) if has_norm else None
    layer: Any = SimpleNamespace(num_gates=size, act=gelu_tanh if seed % 2 else silu)
    with patch.object(fused_step, "ROUNDED_NUMBERS", 32):
        made = [STEP.add(rows, None, 1.0, None, norm, True)[1], STEP.gate_rounded(layer, mixed)]
    plain = [STEP.add(rows, None, 1.0, None, norm)[1], STEP.gate(layer, mixed)]
    for rounded, want in zip(made, plain, strict=True):
        assert isinstance(rounded, RoundedRows) and isinstance(want, Tensor)
        scale = want.abs().amax(1, keepdim=True).float().div(448.0).clamp_min(1e-12)
        torch.testing.assert_close(rounded.scales, scale, rtol=1e-6, atol=0)
        step = 0.07  # of two numbers in float8, where a last digit before decides
        want = (want / scale).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(rounded.values.float(), want, rtol=2 * step, atol=2**-9)
        assert (rounded.values.float() == want).float().mean() > 0.98


class GemmaNorm(nn.Module):
    """A norm whose class name tells the fused layer to add 1 to the norm's weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps


def norm_of(draw: Any, size: int, dtype: torch.dtype, seed: int) -> Norm | None:
    make = draw(st.sampled_from([None, SimpleNamespace, GemmaNorm]))
    if make is None:
        return None
    return Norm(make(weight=random(seed, size).to(dtype), eps=draw(st.sampled_from([1e-6, 1e-2]))))


def close(have: Tensor, want: Tensor) -> None:
    limit = ROUNDING[have.dtype]
    torch.testing.assert_close(have, want.to(have.dtype), atol=limit, rtol=limit)


def normed_exactly(rows: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return rows
    return rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


# -- adding and norms --------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.data(), DTYPES, st.integers(1, 5), st.sampled_from([1, 16, 24, 500, 1024]))
def test_sums_and_norms(data: st.DataObject, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    rows = (random(1, num_tokens, size) * data.draw(st.sampled_from([1.0, 30.0]))).to(dtype)
    added = random(2, num_tokens, size).to(dtype) if data.draw(st.booleans()) else None
    added_norm, norm = (norm_of(data.draw, size, dtype, seed) for seed in (3, 4))
    share = data.draw(st.sampled_from([1.0, 0.22]))
    before = rows.clone()
    out, normed = STEP.add(rows, added, share, added_norm, norm)
    assert torch.equal(rows, before), "what was given stays"
    if added is None:
        assert out is rows
    else:
        close(out, rows.double() + share * normed_exactly(added.double(), added_norm))
    close(normed, normed_exactly(out.double(), norm))
    for row in range(num_tokens):
        part = slice(row, row + 1)
        alone = STEP.add(rows[part], None if added is None else added[part], share, added_norm, norm)
        assert torch.equal(alone[0][0], out[row])
        assert torch.equal(alone[1][0], normed[row])


def test_a_row_that_is_not_a_number_harms_no_other() -> None:
    rows, added = random(1, 3, 40), random(2, 3, 40)
    norm = Norm(SimpleNamespace(weight=random(3, 40), eps=1e-6))
    want = STEP.add(rows, added, 1.0, None, norm)
    added[1, 7] = float("nan")
    have = STEP.add(rows, added, 1.0, None, norm)
    assert have[1][1].isnan().all()
    for row in (0, 2):
        assert torch.equal(have[1][row], want[1][row])


# -- heads -------------------------------------------------------------------------------------------------------


class Heads:
    """Random heads of one layer, and a KV cache to which the layer writes them."""

    def __init__(self, draw: Any) -> None:
        self.num_heads, self.num_kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (7, 1), (20, 4)]))
        self.head_dim = draw(st.sampled_from([2, 8, 24, 64]))
        self.dtype = draw(DTYPES)
        self.layer_idx = 0
        self.is_rotated = draw(st.booleans())
        self.head_norm = self._norm(draw(st.sampled_from([None, False, True])), draw(st.booleans()))
        shape = LayerGeometry(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)
        self.cache = KVCache(Geometry({0: shape}, 2), 9, 3, self.dtype, CPU)
        self.length = draw(st.integers(1, 6))
        self.attend = PagedAttention(self.cache, ReferenceKernel())
        mirror = CachedRequestState()
        mirror.tokens = [0] * 12
        mirror.add_blocks((7, 2, 8, 0))
        self.attend.step = pack_step([PlanRow(0, 12 - self.length, self.length)], [mirror], 3, CPU)
        self.mixed = random(5, self.length, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim).to(self.dtype)
        angles = random(6, self.length, 1, self.head_dim // 2) * 3
        self.turn = tuple(
            torch.cat(two, -1).to(self.dtype) for two in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))
        )
        self.angles = self._placed(draw(st.integers(1, 3)), draw(st.permutations(range(self.length))))

    def _placed(self, num_tables: int, order: list[int]) -> Angles:
        """Return the angles in the given order and in one of several tables, whose other tables hold NaN."""
        self.table = num_tables - 1
        wrong = tuple(torch.full_like(each, float("nan")) for each in self.turn)
        computed = angles_of([wrong] * self.table + [self.turn])
        places = torch.tensor(order)
        tables = torch.stack(computed.tables, 1)
        return Angles(torch.empty_like(tables).index_copy_(0, places, tables).unbind(1), places)

    def _norm(self, is_of_all: bool | None, is_wide: bool) -> HeadNorm | None:
        if is_of_all is None:
            return None
        make: Any = GemmaNorm if is_wide else SimpleNamespace
        counts = (self.num_heads, self.num_kv_heads) if is_of_all else (1, 1)
        queries, keys = (
            make(weight=random(seed, count * self.head_dim).to(self.dtype), eps=1e-3)
            for seed, count in enumerate(counts)
        )
        return HeadNorm(queries, keys, self.num_heads, self.num_kv_heads, self.head_dim)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        for part in self.cache.layers[0].parts:
            part.fill_(float("nan"))
        query = STEP.turn(self, self.mixed, self.angles, self.attend)  # type: ignore[arg-type]
        return query, self.cache.layers[0].keys.clone(), self.cache.layers[0].values.clone()

    def exactly(self) -> Tensor:
        """Return the exact heads [T, Hq + Hkv, D] that the layer should compute."""
        heads = self.mixed.double().view(self.length, -1, self.head_dim)
        turned = heads[:, : self.num_heads + self.num_kv_heads]
        if self.head_norm is not None:
            parts = turned[:, : self.num_heads], turned[:, self.num_heads :]
            dims = (-1, -2) if self.head_norm.is_of_all else (-1,)
            parts = tuple(part * torch.rsqrt((part * part).mean(dims, True) + self.head_norm.eps) for part in parts)
            turned = torch.cat(parts, 1) * self.head_norm.weight.double()
        cos, sin = (table.double() for table in self.turn)
        return turned * cos + turned.roll(self.head_dim // 2, -1) * sin if self.is_rotated else turned


@settings(max_examples=60)
@given(st.data())
def test_heads_are_normed_and_turned_and_go_to_their_slots(data: st.DataObject) -> None:
    heads = Heads(data.draw)
    query, keys, values = heads.run()
    want = heads.exactly()
    assert heads.attend.step is not None
    slots = heads.attend.step.slots
    close(query, want[:, : heads.num_heads])
    close(keys[slots], want[:, heads.num_heads :])
    stored = heads.mixed.view(heads.length, -1, heads.head_dim)[:, heads.num_heads + heads.num_kv_heads :]
    assert torch.equal(values[slots], stored), "values as they are"
    others = torch.ones(len(keys), dtype=torch.bool).index_fill(0, slots, False)
    assert keys[others].isnan().all(), "no other slot was written"
    assert values[others].isnan().all()


@settings(max_examples=20)
@given(st.data())
def test_a_token_is_bitwise_the_same_beside_others(data: st.DataObject) -> None:
    """A token's heads do not depend on how heads and tokens are grouped into kernel programs."""
    heads = Heads(data.draw)
    want = heads.run()
    with patch.object(fused_step, "HEAD_NUMBERS", data.draw(st.sampled_from([16, 64, 4096]))):
        if heads.head_norm is None or not heads.head_norm.is_of_all:
            for have, whole in zip(heads.run(), want, strict=True):
                assert torch.equal(have.nan_to_num(), whole.nan_to_num())
    place = data.draw(st.integers(0, heads.length - 1))
    other = torch.arange(heads.length) != place
    heads.mixed[other] = 100.0
    assert torch.equal(heads.run()[0][place], want[0][place])


# -- gates -------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(DTYPES, st.integers(1, 4), st.sampled_from([1, 24, 1024, 1500]), st.booleans())
def test_gates_are_activation_times_input(dtype: torch.dtype, num_tokens: int, size: int, is_gelu: bool) -> None:
    layer: Any = SimpleNamespace(num_gates=size, act=gelu_tanh if is_gelu else silu)
    mixed = (random(7, num_tokens, 2 * size) * 4).to(dtype)
    have = STEP.gate(layer, mixed)
    wide = mixed.double()
    close(have, layer.act(wide[:, :size]) * wide[:, size:])
    for row in range(num_tokens):
        assert torch.equal(STEP.gate(layer, mixed[row : row + 1])[0], have[row])


@pytest.mark.parametrize("act", [silu, gelu_tanh])
def test_gates_of_large_and_of_no_numbers(act: Any) -> None:
    far = torch.tensor([[-1e12, -90.0, 0.0, 90.0, 1e12, float("nan")]])
    layer: Any = SimpleNamespace(num_gates=6, act=act)
    have = STEP.gate(layer, torch.cat([far, torch.ones_like(far)], 1))
    torch.testing.assert_close(have, torch.tensor([[0.0, 0.0, 0.0, 90.0, 1e12, float("nan")]]), equal_nan=True)


# -- memory ------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.data())
def test_no_program_leaves_its_tensors(data: st.DataObject) -> None:
    """On a GPU, an address outside of the tensors would belong to other data or crash the process."""
    heads = Heads(data.draw)
    made: list[Tensor] = []

    def noting(make: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            made.append(make(*args, **kwargs))
            return made[-1]

        return noted

    size = data.draw(st.sampled_from([1, 24, 1500]))
    rows, added = random(1, 3, size), random(2, 3, size)
    norms = [Norm(SimpleNamespace(weight=random(seed, size), eps=1e-6)) for seed in (3, 4)]
    mixed = random(5, 3, 2 * size)
    layer: Any = SimpleNamespace(num_gates=size, act=silu)
    news, likes = noting(Tensor.new_empty), noting(torch.empty_like)
    with watched() as touched, patch.object(Tensor, "new_empty", news), patch.object(torch, "empty_like", likes):
        STEP.add(rows, added, 0.5, *norms)
        STEP.gate(layer, mixed)
        heads.angles.places[0] = data.draw(st.sampled_from([0, -1, 99]))
        STEP.turn(heads, heads.mixed, heads.angles, heads.attend)  # type: ignore[arg-type]
    assert touched
    assert heads.attend.step is not None
    held = [rows, added, mixed, heads.mixed, heads.attend.step.slots, *heads.cache.layers[0].parts, *made]
    held += [heads.angles.places, heads.angles.tables[0]._base]  # tables lie side by side
    held += [norm.weight for norm in (*norms, heads.head_norm) if norm is not None]
    spans = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes) for one in held})
    begins, ends = (np.array(edges, dtype=np.uint64) for edges in zip(*spans, strict=True))
    ends = np.maximum.accumulate(ends)  # some lie in others
    for addresses, width in touched:
        flat = addresses.ravel().astype(np.uint64)
        owners = np.searchsorted(begins, flat, "right") - 1
        assert (owners >= 0).all()
        assert (flat + np.uint64(width) <= ends[owners]).all()


# -- whole models ------------------------------------------------------------------------------------------------

FAMILIES = ("gemma", "gemma2", "gemma3_text", "granite", "llama", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_what_its_own_layers_give(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    honest = FusedStep.advance

    def counting(self: FusedStep, rows: Tensor, *rest: Any) -> Tensor:
        used.append(len(self._layers))
        return honest(self, rows, *rest)

    monkeypatch.setattr(FusedStep, "advance", counting)
    report = check_model(tiny_checkpoints.cached_checkpoint(family), kernel="paged", max_tokens=40)
    assert report.is_equal, str(report)
    assert used.count(report.num_layers) >= report.num_steps, "each step went through the kernels"


def runner_of(family: str, dtype: torch.dtype) -> Any:
    from bridle.model import support_checks
    from bridle.model.checkpoint import inspect_checkpoint
    from bridle.model.geometry import discover_geometry
    from bridle.model.loader import lower_model, read_model
    from bridle.model.runner import ModelRunner

    checkpoint = inspect_checkpoint(tiny_checkpoints.cached_checkpoint(family))
    config = support_checks.read_config(checkpoint)
    model = read_model(checkpoint, config, dtype, CPU)
    geometry = discover_geometry(model, config.num_hidden_layers, CPU)
    lower_model(model, geometry)
    cache = KVCache(geometry, 8, 4, dtype, CPU)
    return ModelRunner(model, PagedAttention(cache, create_kernel("paged", CPU, dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_trial_lets_the_kernels_pass(family: str, dtype: torch.dtype) -> None:
    assert isinstance(runner_of(family, dtype).lowered.fused, FusedStep)


class TurnedStep(FusedStep):
    """A fused step for ranks that are threads; a lock protects Triton's interpreter, which all threads share."""

    lock = Lock()

    def add(self, *args: Any) -> Any:
        with self.lock:
            return super().add(*args)

    def turn(self, *args: Any) -> Any:
        with self.lock:
            return super().turn(*args)

    def gate(self, *args: Any) -> Any:
        with self.lock:
            return super().gate(*args)


def attention_of_five(geometry: Geometry) -> PagedAttention:
    """Return plain torch attention of a step of one sequence with five tokens."""
    attend = PagedAttention(KVCache(geometry, 4, 4, torch.float32, CPU), CpuKernel())
    mirror = CachedRequestState()
    mirror.tokens = [5, 9, 3, 250, 7]
    mirror.add_blocks((3, 1))
    attend.step = pack_step([PlanRow(0, 0, 5, num_logits=5)], [mirror], 4, CPU)
    attend.kernel.begin(attend.step)
    return attend


@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen2", "qwen3"])
def test_ranks_add_up_within_the_fused_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the ranks' partial results gives the logits of the whole model."""
    monkeypatch.setattr(fused_step, "FusedStep", TurnedStep)
    whole, geometry = part_of(family, torch.float32, is_lean=False)
    attend = attention_of_five(geometry)
    assert attend.step is not None
    ids, places, ends = attend.step.input_ids, attend.step.position_ids, attend.step.logits_rows
    with torch.inference_mode(), attention_handler(attend):
        want = whole(input_ids=ids, position_ids=places, use_cache=False).logits[0]
    monkeypatch.setattr(PagedAttention, "is_plain", False)

    def work(rank: int) -> Tensor:
        with tensor_parallel.unsummed():
            model, geometry = part_of(family, torch.float32, is_lean=True)
            short, mine = try_lower_model(model), attention_of_five(geometry)
            assert short is not None
            short.fuse(mine)
        assert isinstance(short.fused, TurnedStep)
        with torch.inference_mode():
            return short(ids, places, ends, mine)

    for have in Ranks(2).run(work):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["add", "turn", "gate"])
def test_the_trial_lets_no_others_pass(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = getattr(FusedStep, part)

    def wrong(self: FusedStep, *args: Any) -> Any:
        made = honest(self, *args)
        (made[0] if part == "add" else made).mul_(1.5)
        return made

    monkeypatch.setattr(FusedStep, part, wrong)
    assert runner_of("qwen3", torch.float32).lowered.fused is None
    assert "in plain torch between matrix products and attention: the fused kernels differ in layer" in caplog.text


def test_what_is_stored_is_compared_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FusedStep.turn

    def forgetful(self: FusedStep, layer: DenseLayer, mixed: Tensor, angles: Any, attend: PagedAttention) -> Tensor:
        query = honest(self, layer, mixed, angles, attend)
        attend.cache.layers[layer.layer_idx].values[-1] = 9.0  # no token's slot: attention does not see it
        return query

    monkeypatch.setattr(FusedStep, "turn", forgetful)
    assert runner_of("qwen3", torch.float32).lowered.fused is None
