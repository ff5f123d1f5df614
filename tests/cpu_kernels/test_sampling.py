"""Tests of the sampling functions of every kernel object that this machine can run, compared with plain torch and row
by row."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridle.cpu_kernels.sampling import COLUMNS, MAX_BEST, SamplingKernels
from bridle.errors import InternalError
from bridle.model.sampling.draw import draw_by_torch
from bridle.model.sampling.filters import apply_filters, cuts_of
from bridle.model.sampling.fixed_point_probs import UNIT, weights_of
from bridle.sampling import SamplingParams
from tests.conftest import examples
from tests.cpu_kernels.blocks import OBJECTS, kernels

each_object = pytest.mark.parametrize("name", OBJECTS)
invariant = settings(max_examples=examples(30), deadline=None)
seeds = st.integers(0, 1 << 16)


@cache
def functions(name: str) -> SamplingKernels:
    return SamplingKernels(kernels(name))


def random_rows(seed: int, num_rows: int, num_blocks: int, *, levels: int = 0, forbidden: float = 0.0) -> Tensor:
    """Return random logits; `levels` limits the number of different values, `forbidden` is the share that is -inf."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_rows, num_blocks * COLUMNS
    work = torch.randn(shape, generator=generator) * 4
    if levels:
        work = torch.randint(levels, shape, generator=generator).float()
    work[torch.rand(shape, generator=generator) < forbidden] = -math.inf
    return work


def uniforms(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 2 + 0.1


def unknown(count: int) -> Tensor:
    """Return weight totals of -1, which tell the kernel to compute the totals."""
    return torch.full((count, 1), -1.0, dtype=torch.float64)


@each_object
@given(
    seed=seeds, num_rows=st.integers(1, 7), num_blocks=st.integers(1, 9), forbidden=st.sampled_from([0.0, 0.5, 0.999])
)
@invariant
def test_draws_are_those_of_torch(name: str, seed: int, num_rows: int, num_blocks: int, forbidden: float) -> None:
    """Tokens equal torch's unless the random number is within a rounding error of the edge between two tokens."""
    work = random_rows(seed, num_rows, num_blocks, forbidden=forbidden)
    work[:, seed % work.shape[1]] = 1.0  # one is always left
    best, temperature, uniform = work.amax(1), spread(seed, num_rows), uniforms(seed, num_rows)
    kept = work.clone()
    tokens, totals = functions(name).draw(work, range(num_rows), best, temperature, uniform)
    assert torch.equal(work, kept)
    shifted = (work - best[:, None]) / temperature[:, None]
    wanted, wanted_totals = draw_by_torch(shifted.clone(), uniform)
    assert torch.allclose(totals, wanted_totals, rtol=1e-5)
    assert bool((work.gather(1, tokens[:, None]) > -math.inf).all())
    ends = weights_of(shifted).double().cumsum(1) / wanted_totals
    gap = (ends - uniform[:, None]).abs().amin(1)
    assert all(have == want or near < 1e-5 for have, want, near in zip(tokens, wanted, gap.tolist(), strict=True))


@each_object
@given(
    seed=seeds,
    num_blocks=st.integers(1, 9),
    levels=st.sampled_from([0, 3, 40]),
    forbidden=st.sampled_from([0.0, 0.5, 0.999]),
    params=st.lists(
        st.builds(
            SamplingParams,
            top_k=st.sampled_from([0, 1, 5, MAX_BEST, 1 << 20]),
            top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
            min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
)
@invariant
def test_draws_after_cuts_are_those_of_torch(
    name: str, seed: int, num_blocks: int, levels: int, forbidden: float, params: list[SamplingParams]
) -> None:
    """Equal totals after top-k, top-p and min-p show that the same tokens remained."""
    count = len(params)
    work = random_rows(seed, count, num_blocks, levels=levels, forbidden=forbidden)
    work[:, seed % work.shape[1]] = 1.0
    best, temperature, uniform = work.amax(1), spread(seed, count), uniforms(seed, count)
    tokens, totals = functions(name).draw(work, range(count), best, temperature, uniform, cuts_of(params))
    shifted = (work - best[:, None]) / temperature[:, None]
    whole = weights_of(shifted).double().sum(1)
    apply_filters(shifted, params)
    wanted, wanted_totals = draw_by_torch(shifted.clone(), uniform)
    weights = weights_of(shifted).double()
    ends = weights.cumsum(1) / wanted_totals
    gap = (ends - uniform[:, None]).abs().amin(1).tolist()
    for row, p in enumerate(params):
        ordered = weights[row].sort(descending=True).values.cumsum(0)
        if p.top_p < 1.0 and float((ordered / (ordered[-1] if p.top_k else whole[row]) - p.top_p).abs().amin()) < 1e-5:
            continue  # the edge is within rounding
        assert math.isclose(totals[row], wanted_totals[row], rel_tol=1e-5), p
        assert tokens[row] == wanted[row] or gap[row] < 1e-5
        assert work[row, tokens[row]] > -math.inf and shifted[row, tokens[row]] > -math.inf


@each_object
@given(seed=seeds, num_rows=st.integers(2, 9), num_blocks=st.integers(1, 5))
@invariant
def test_a_row_gives_alone_what_it_gives_among_others(name: str, seed: int, num_rows: int, num_blocks: int) -> None:
    work, found = random_rows(seed, num_rows, num_blocks, forbidden=0.1), functions(name)
    uniform, ones = uniforms(seed, num_rows), spread(seed, num_rows)
    where = list(range(num_rows))[::-1]
    tokens, totals = found.draw(work, where, work.amax(1).flip(0), ones, uniform)
    told = found.survey(work, tokens.flip(0).tolist(), unknown(num_rows), 6)
    for slot, row in enumerate(where):
        alone, one = work[row : row + 1].clone(), slice(slot, slot + 1)
        drawn = found.draw(alone, [0], alone.amax(1), ones[one], uniform[one])
        assert [each.item() for each in drawn] == [tokens[slot].item(), totals[slot].item()]
        assert torch.equal(found.survey(alone, tokens[one].tolist(), unknown(1), 6)[0], told[row])


@each_object
@given(
    seed=seeds,
    num_blocks=st.sampled_from([1, 2, 8, 33]),
    size=st.sampled_from([0, 1, 5, 24, MAX_BEST]),
    levels=st.sampled_from([0, 3, 1000]),
    forbidden=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
)
@invariant
def test_the_best_and_ranks_are_those_of_the_whole_row(
    name: str, seed: int, num_blocks: int, size: int, levels: int, forbidden: float
) -> None:
    """Of equal logits the first ones in the row come first, so that token ids are the same on every processor."""
    work, found = random_rows(seed, 3, num_blocks, levels=levels, forbidden=forbidden), functions(name)
    tokens = [seed % work.shape[1], int(work[1].argmax()), int(work[2].argmin())]
    told = found.survey(work, tokens, unknown(3), size)
    chosen, best, places = told[:, :1], told[:, 2 : 2 + size], told[:, 2 + size : 2 + 2 * size]
    assert torch.equal(chosen, work.gather(1, torch.tensor(tokens)[:, None]).double())
    assert torch.equal(told[:, 1:2], (work > chosen).sum(1, keepdim=True).double() + 1)
    wanted, order = work.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best, wanted[:, :size].double())
    is_real = best > -math.inf
    assert torch.equal(places[is_real], order[:, :size][is_real].double())
    assert torch.equal(told[:, -2], wanted[:, 0].double())


@each_object
@given(seed=seeds, num_blocks=st.integers(1, 9), forbidden=st.sampled_from([0.0, 0.5, 0.999]))
@invariant
def test_totals_are_told_as_they_are_known_or_counted(name: str, seed: int, num_blocks: int, forbidden: float) -> None:
    work, found = random_rows(seed, 3, num_blocks, forbidden=forbidden), functions(name)
    work[:, seed % work.shape[1]] = 1.0
    drawn = found.draw(work, range(3), work.amax(1), torch.ones(3), uniforms(seed, 3))[1]
    totals = torch.tensor([[-1.0], [123.0], [-1.0]], dtype=torch.float64)
    told = found.survey(work, [0, 0, 0], totals, 2)
    assert told[:, -1].tolist() == [drawn[0, 0].item(), 123.0, drawn[2, 0].item()]


@each_object
def test_what_is_no_number_is_told_and_draws_nothing_wild(name: str) -> None:
    work, found = random_rows(1, 3, 2), functions(name)
    work[0, 300], work[1], work[2] = math.nan, math.nan, -math.inf
    told = found.survey(work, [300, 0, 0], unknown(3), 2)
    assert told[:, -2].isnan().tolist() == [True, True, False]  # the largest one
    assert not told[:, 2:6].isnan().any()
    tokens, totals = found.draw(work, range(3), work.amax(1), torch.ones(3), uniforms(1, 3))
    assert all(0 <= token < 2 * COLUMNS for token in tokens.tolist()) and totals.tolist() == [[0.0]] * 3


@each_object
def test_shares_are_those_of_the_probabilities(name: str) -> None:
    work, count = random_rows(5, 1, 1), 20_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, totals = functions(name).draw(
        work, [0] * count, work.amax(1).expand(count).contiguous(), torch.ones(count), uniform
    )
    shares = torch.bincount(tokens, minlength=COLUMNS).double() / count
    assert float((shares - work[0].double().softmax(0)).abs().max()) < 2 / count
    assert math.isclose(math.log(totals[0, 0].item() / UNIT), work[0].double().logsumexp(0) - work.max(), rel_tol=1e-6)


@each_object
def test_wrong_arguments_never_leave_python(name: str) -> None:
    found, work = functions(name), random_rows(1, 2, 1)
    ones, half = torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64)
    for where, rows in (([0, 2], work), ([-1, 0], work), ([0, 1], work[:, :255]), ([0, 1], work.double())):
        with pytest.raises(InternalError):
            found.draw(rows, where, ones, ones, half)
    with pytest.raises(InternalError, match="temperatures"):
        found.draw(work, [0, 1], ones, torch.ones(1), half)
    with pytest.raises(InternalError, match=f"the {MAX_BEST + 1} best"):
        found.survey(work, [0, 0], unknown(2), MAX_BEST + 1)
    for tokens in ([0], [0, COLUMNS], [-1, 0]):
        with pytest.raises(InternalError, match="tokens"):
            found.survey(work, tokens, unknown(2), 1)
    with pytest.raises(InternalError, match="totals"):
        found.survey(work, [0, 0], unknown(1), 1)


def random_masks(seed: int, num_rows: int, columns: int) -> list[bytes | None]:
    """Return random masks, shorter or longer than a row, that allow all, few, some or no tokens; None is no mask."""
    generator = torch.Generator().manual_seed(seed)
    masks: list[bytes | None] = []
    for _ in range(num_rows):
        size = int(torch.randint(columns // 8 + 9, (1,), generator=generator))
        bits = torch.randint(256, (size,), generator=generator)
        kind = int(torch.randint(5, (1,), generator=generator))
        kept = torch.rand(size, generator=generator) < 0.02
        made = [bits, torch.full_like(bits, 255), torch.where(kept, bits, 0), torch.zeros_like(bits)]
        masks.append(None if kind == 4 else bytes(made[kind].tolist()))
    return masks


def allowed(work: Tensor, mask: bytes | None) -> Tensor:
    """Return the logits row with -inf for each token that the mask forbids."""
    if mask is None:
        return work
    bits = [i // 8 < len(mask) and bool(mask[i // 8] >> i % 8 & 1) for i in range(len(work))]
    return torch.where(torch.tensor(bits, dtype=torch.bool), work, -math.inf)


@each_object
@given(
    seed=seeds,
    num_rows=st.integers(1, 6),
    columns=st.integers(1, 1100),
    levels=st.sampled_from([0, 3]),
    none=st.sampled_from([0.0, 0.001]),
)
@invariant
def test_the_largest_is_the_first_of_those_that_a_mask_allows(
    name: str, seed: int, num_rows: int, columns: int, levels: int, none: float
) -> None:
    wide = random_rows(seed, num_rows + 1, 5, levels=levels)
    wide[torch.rand(wide.shape, generator=torch.Generator().manual_seed(seed)) < none] = math.nan
    logits = wide[:, :columns]
    where = torch.randint(num_rows + 1, (num_rows,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    masks = random_masks(seed, num_rows, columns)
    best, places = functions(name).largest(logits, where, masks)
    for row, mask, have, place in zip(where, masks, best, places.tolist(), strict=True):
        want = allowed(logits[row], mask)
        if bool(want.isnan().any()):
            assert have.isnan() and place == int(want.isnan().int().argmax())
        else:
            assert have == want.max()
            assert have == -math.inf or place == int((want == want.max()).int().argmax())


@each_object
@given(seed=seeds, num_rows=st.integers(1, 6), num_blocks=st.integers(1, 5))
@invariant
def test_what_a_mask_does_not_allow_is_written_over(name: str, seed: int, num_rows: int, num_blocks: int) -> None:
    work = random_rows(seed, num_rows, num_blocks)
    masks = [mask for mask in random_masks(seed, num_rows, work.shape[1]) if mask is not None]
    where = list(range(num_rows))[::-1][: len(masks)]
    want = work.clone()
    for row, mask in zip(where, masks, strict=True):
        want[row] = allowed(want[row], mask)
    functions(name).allow(work, where, masks)
    assert torch.equal(work, want)


@each_object
def test_masks_and_rows_that_do_not_fit_each_other_are_refused(name: str) -> None:
    work = random_rows(1, 2, 1)
    with pytest.raises(InternalError, match=r"1 masks for the row indices \[0, 1\] of 2"):
        functions(name).largest(work, [0, 1], [None])
    with pytest.raises(InternalError, match=r"1 masks for the row indices \[2\] of 2"):
        functions(name).allow(work, [2], [b"x"])
    with pytest.raises(InternalError, match="strides"):
        functions(name).largest(work.t(), [0], [None])
    with pytest.raises(InternalError, match="float64 logits"):
        functions(name).largest(work.double(), [0], [None])
