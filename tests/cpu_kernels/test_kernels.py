"""Tests of every kernel object that this machine can run, compared with plain torch and with each row computed
alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.cpu_kernels.ggml import TYPES, SplitBlocks, dequantize, split_blocks
from bridle.cpu_kernels.kernels import Kernels
from bridle.cpu_kernels.library import try_out
from bridle.cpu_kernels.packing import (
    joined,
    pack_blocks,
    pack_float32,
    pack_int8,
    pack_side_by_side,
    plain_fill,
    unpack_blocks,
    unpack_float32,
    unpack_int8,
    unpack_rows,
)
from bridle.errors import InternalError
from bridle.model.quantize import Int8Linear
from tests.conftest import examples
from tests.cpu_kernels.blocks import OBJECTS, kernels, random_blocks

FORMS = ["int8", *TYPES, "float32"]


def make(found: Kernels, form: str, num_outputs: int, num_inputs: int, seed: int):
    """Return a packed random matrix of a form, and its weight in float64."""
    bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(seed))
    if form == "int8":
        generator = torch.Generator().manual_seed(seed)
        integers = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
        scale = torch.rand(num_outputs, generator=generator) / 100
        packed = pack_int8(integers, scale, found.lanes, found.zero)
        return found.matrix(packed, bias), integers.double() * scale[:, None].double()
    if form == "float32":
        weight = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed)) / 100
        packed = pack_float32(weight, found.lanes)
        assert torch.equal(unpack_float32(packed, found.lanes), weight)
        return found.matrix(packed, bias), weight.double()
    kind = TYPES[form]
    blocks = torch.from_numpy(random_blocks(form, num_outputs, num_inputs, seed))
    return found.matrix(pack_blocks(kind, blocks, found.lanes, found.pack), bias), dequantize(kind, blocks).double()


def rounded(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Return the float64 values of rows [n, in] after rounding to 8-bit integers with one scale per group."""
    groups = rows.view(rows.shape[0], -1, group)
    scale = groups.abs().amax(-1, keepdim=True).div(127).clamp_min(1e-12)
    return (torch.round(groups / scale).double() * scale.double()).view(rows.shape)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("form", FORMS)
@given(
    num_outputs=st.integers(1, 70), num_blocks=st.integers(1, 3), num_rows=st.integers(1, 40), seed=st.integers(0, 999)
)
@settings(max_examples=examples(15), deadline=None)
def test_products_are_right_and_rows_independent(
    name: str, form: str, num_outputs: int, num_blocks: int, num_rows: int, seed: int
) -> None:
    found = kernels(name)
    num_inputs = num_blocks * (TYPES[form].inputs if form in TYPES else 48)
    matrix, weight = make(found, form, num_outputs, num_inputs, seed)
    sizes = torch.logspace(-3, 3, num_rows)[:, None]
    rows = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(seed)) * sizes
    together = found.linear(matrix, rows)
    given = rows.double() if form == "float32" else rounded(rows, num_inputs if form == "int8" else 32)
    want = given @ weight.t() + matrix.bias.double()
    # Rounding of float32, of which the largest sum decides the size: no term is larger than these.
    bound = 1e-6 * (rows.abs().double() @ weight.abs().t() + 1) + 3e-6 * num_inputs * sizes * float(weight.abs().max())
    assert bool(((together.double() - want).abs() <= bound).all())
    for number in range(num_rows):
        assert torch.equal(found.linear(matrix, rows[number : number + 1])[0], together[number])


@pytest.mark.parametrize("name", OBJECTS)
@given(
    num_outputs=st.integers(1, 90),
    num_inputs=st.integers(1, 200),
    num_rows=st.integers(1, 30),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(40), deadline=None)
def test_eight_bits_are_those_of_torch(name: str, num_outputs: int, num_inputs: int, num_rows: int, seed: int) -> None:
    found = kernels(name)
    torch.manual_seed(seed)
    linear = torch.nn.Linear(num_inputs, num_outputs).requires_grad_(False)
    plain = Int8Linear(linear, is_native=False)
    packed = pack_int8(plain.quantized, plain.scale, found.lanes, found.zero)
    rows = torch.randn(num_rows, num_inputs) * torch.logspace(-3, 3, num_rows)[:, None]
    have = found.linear(found.matrix(packed, plain.bias), rows)
    sums = (torch.round(rows / scale_of(rows)).double() @ plain.quantized.double().t()).float()
    assert torch.equal(have, sums.mul(scale_of(rows)).mul(plain.scale) + plain.bias)
    if num_inputs % 8 == 0 and num_outputs % 8 == 0:  # what torch's integer product takes
        assert torch.equal(have, plain(rows))
    integers, scale = unpack_int8(packed, found.lanes, found.zero)
    assert torch.equal(integers, plain.quantized) and torch.equal(scale, plain.scale)


def scale_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(1, keepdim=True).div(127).clamp_min(1e-12)


@pytest.mark.parametrize(("lanes", "zero"), [(8, 0), (8, 128), (16, 128)])
@pytest.mark.parametrize("shape", [(16, 64), (21, 64), (16, 50), (3, 7)])
def test_integers_are_packed_wherever_they_lie(shape: tuple[int, int], lanes: int, zero: int) -> None:
    """Packing gives the same bytes for a view into other memory and for a transposed tensor, and pads with zeros."""
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    memory = torch.cat([torch.ones(3, dtype=torch.int8), integers.flatten()])
    scale = torch.rand(shape[0], generator=generator)
    packed = [
        pack_int8(each, scale, lanes, zero)
        for each in (integers, memory[3:].view(shape), integers.t().contiguous().t())
    ]
    for one in packed:
        assert torch.equal(one.weights, packed[0].weights)
        again = unpack_int8(one, lanes, zero)
        assert torch.equal(again[0], integers) and torch.equal(again[1], scale)
    whole = packed[0].weights.view(-1, packed[0].inputs // 4, lanes, 4).transpose(1, 2).reshape(-1, packed[0].inputs)
    assert int((whole ^ zero).count_nonzero()) == int(integers.count_nonzero())


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("zero", [0, 128])
@pytest.mark.parametrize("form", TYPES)
def test_unpacking_undoes_packing(form: str, lanes: int, zero: int) -> None:
    kind, rows = TYPES[form], torch.tensor([20, 0, 7, 8, 7])
    blocks = torch.from_numpy(random_blocks(form, 21, 2 * kind.inputs, 5))
    packed = pack_blocks(kind, blocks, lanes, plain_fill(lanes, zero))
    _check_same(unpack_blocks(kind, packed, lanes, zero), split_blocks(kind, blocks))
    _check_same(unpack_rows(kind, packed, lanes, zero, rows), split_blocks(kind, blocks[rows]))


def _check_same(have: SplitBlocks, want: SplitBlocks) -> None:
    for field in want.__slots__:
        mine, its = getattr(have, field), getattr(want, field)
        assert (mine is None) == (its is None)
        assert its is None or (mine.dtype == its.dtype and torch.equal(mine.flatten(), its.flatten()))


@pytest.mark.few(24)
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("form", TYPES)
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (53, 2), (16, 3), (640, 1)])
def test_kernels_pack_as_plain_torch_does(name: str, form: str, outputs: int, blocks: int) -> None:
    found, kind = kernels(name), TYPES[form]
    rows = torch.from_numpy(random_blocks(form, outputs, blocks * kind.inputs, 5))
    have = pack_blocks(kind, rows, found.lanes, found.pack)
    want = pack_blocks(kind, rows, found.lanes, plain_fill(found.lanes, found.zero))
    assert torch.equal(have.weights, want.weights) and torch.equal(have.scales, want.scales)


@pytest.mark.parametrize("changes", [{"blocks": 1}, {"weights": 1}, {"scales": 1}], ids=str)
def test_packing_into_memory_of_another_size_is_refused(changes: dict[str, int]) -> None:
    found, kind = kernels(OBJECTS[0]), TYPES["Q4_K"]
    sizes = {"blocks": 144, "weights": 128 * found.lanes, "scales": 20 * found.lanes}
    parts = {name: torch.zeros(size - changes.get(name, 0), dtype=torch.uint8) for name, size in sizes.items()}
    with pytest.raises(InternalError, match=next(iter(changes))):
        found.pack(kind, parts["blocks"].unsqueeze(0), parts["weights"], parts["scales"])


def test_matrices_that_lie_side_by_side_are_one() -> None:
    kind, fill = TYPES["Q4_1"], plain_fill(8, 0)
    blocks = torch.from_numpy(random_blocks("Q4_1", 45, 64, 5))
    parts = pack_side_by_side(kind, [blocks[:16], blocks[16:24], blocks[24:]], 8, fill)
    whole, one = pack_blocks(kind, blocks, 8, fill), joined(parts, 8)
    assert one is not None and (one.outputs, one.inputs, one.given) == (45, 64, 64)
    assert one.weights.data_ptr() == parts[0].weights.data_ptr()
    assert torch.equal(one.weights, whole.weights) and torch.equal(one.scales, whole.scales)
    assert joined(parts[::-1], 8) is None, "not in this order"
    assert joined([pack_blocks(kind, blocks[:16], 8, fill), parts[1]], 8) is None, "apart"
    assert joined([*pack_side_by_side(kind, [blocks[:12], blocks[12:]], 8, fill)], 8) is None, "half a panel"


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_none(name: str, form: str) -> None:
    """A row with NaN or infinity gives no finite result, and the results of other rows do not change."""
    found = kernels(name)
    matrix, _ = make(found, form, 20, 256, 1)
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    clean = found.linear(matrix, rows)
    for bad in (float("nan"), float("inf"), float("-inf")):
        rows[1, 77] = bad
        have = found.linear(matrix, rows)
        assert not bool(torch.isfinite(have[1]).any())
        assert torch.equal(have[0], clean[0]) and torch.equal(have[2], clean[2])


@pytest.mark.parametrize("name", OBJECTS)
def test_zeros_and_tiny_numbers(name: str) -> None:
    found = kernels(name)
    for form in FORMS:
        matrix, _ = make(found, form, 20, 256, 1)
        rows = torch.zeros(2, 256)
        rows[1] = 1e-30
        assert torch.equal(found.linear(matrix, rows), matrix.bias.expand(2, -1))
    assert found.linear(matrix, rows[:0]).shape == (0, 20)


@pytest.mark.parametrize("name", OBJECTS)
def test_threads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels(name)
    for form in FORMS:
        matrix, _ = make(found, form, 1000, 512, 3)
        rows = torch.randn(37, 512, generator=torch.Generator().manual_seed(0))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        alone = found.linear(matrix, rows)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        for _ in range(20):
            assert torch.equal(found.linear(matrix, rows), alone)


@pytest.mark.parametrize("name", OBJECTS)
def test_hostile_shapes_and_types_do_not_reach_the_kernels(name: str) -> None:
    found = kernels(name)
    matrix, _ = make(found, "Q8_0", 20, 64, 1)
    for rows in (
        torch.zeros(2, 63),
        torch.zeros(2, 64, dtype=torch.float64),
        torch.zeros(64, 2).t(),
        torch.zeros(128),
        torch.zeros(2, 64, device="meta"),
    ):
        with pytest.raises(InternalError, match="a CPU kernel cannot take"):
            found.linear(matrix, rows)
    packed = pack_int8(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8), found.lanes, found.zero)
    for field, value in (
        ("weights", packed.weights[:-1]),
        ("scales", packed.scales.repeat(2)),
        ("inputs", 1 << 17),
        ("outputs", 0),
        ("given", 65),
    ):
        changed = {name: getattr(packed, name) for name in packed.__slots__} | {field: value}
        with pytest.raises(InternalError, match="a CPU kernel cannot take"):
            found.matrix(type(packed)(**changed), None)
    with pytest.raises(InternalError, match="bias"):
        found.matrix(packed, torch.zeros(9))


@pytest.mark.parametrize("name", OBJECTS)
def test_largest_sums_do_not_overflow(name: str) -> None:
    """The test sums the largest allowed number of inputs, all with the largest value and the same sign."""
    found = kernels(name)
    num_inputs = 1 << 16
    for sign in (-1, 1):
        integers = torch.full((3, num_inputs), sign * 127, dtype=torch.int8)
        matrix = found.matrix(pack_int8(integers, torch.ones(3), found.lanes, found.zero), None)
        rows = torch.full((2, num_inputs), 127.0)
        assert torch.equal(found.linear(matrix, rows), torch.full((2, 3), sign * 127.0 * 127 * num_inputs))


@pytest.mark.parametrize("name", OBJECTS)
def test_every_object_passes_its_trial(name: str) -> None:
    try_out(kernels(name))
