"""Sampling kernels for rows of logits: masks, argmax, samples, and ranks of given tokens.

Unless stated otherwise, rows are float32, and their width is a multiple of `COLUMNS`. The fields of this module's
structs have the order of sources/sampling.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, addressof, c_char_p, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bridle.cpu_kernels.kernels import Kernels, check_tensor
from bridle.cpu_kernels.threads import is_parallel
from bridle.errors import InternalError

#: Number of columns in a block.
COLUMNS = 256
#: Maximum number of best tokens that kernels find.
MAX_BEST = 128
_MAX_NUMBERS = 1 << 31


class CDraws(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "best", "temperature", "uniform", "where")),
        *((name, c_void_p) for name in ("top_k", "top_p", "floors", "tokens", "totals", "sums", "maxima")),
        ("columns", c_int),
    )


class CAllowance(ctypes.Structure):
    _fields_ = (*((name, c_void_p) for name in ("work", "where", "masks", "sizes")), ("columns", c_int))


class CSearch(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "where", "masks", "sizes", "best", "places")),
        ("stride", c_int64),
        ("columns", c_int),
    )


class CSurvey(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "tokens", "totals", "maxima", "told")),
        *((name, c_int) for name in ("columns", "num_best")),
    )


class Cuts(NamedTuple):
    """Filters of each row, applied after the temperature, to logits minus the largest logit. `top_k` is the number of
    best tokens to keep (0: all). A token is kept only while more probable tokens have less than `top_p` of the total
    weight of these best tokens. Tokens with a logit below the row's value in `floors` are removed."""

    top_k: Sequence[int]
    top_p: Sequence[float]
    floors: Tensor  # float32 [n]

    def check(self, count: int) -> None:
        """Raise `InternalError` if the filters do not have exactly `count` rows."""
        check_tensor(self.floors, torch.float32, count, "floors")
        if len(self.top_k) != count or len(self.top_p) != count or not all(0 <= k <= MAX_BEST for k in self.top_k):
            raise InternalError(
                f"filters for {len(self.top_k)} rows, but {count} are sampled; top_k {list(self.top_k)}"
            )


class SamplingKernels:
    """Calls the C functions of sources/sampling.h with checked arguments."""

    def __init__(self, found: Kernels) -> None:
        self._draw = found.function("bridle_draw", POINTER(CDraws), c_int, c_int)
        self._survey = found.function("bridle_survey", POINTER(CSurvey), c_int, c_int)
        self._allow = found.function("bridle_allow", POINTER(CAllowance), c_int, c_int)
        self._search = found.function("bridle_search", POINTER(CSearch), c_int, c_int)

    def allow(self, work: Tensor, where: Sequence[int], masks: Sequence[bytes]) -> None:
        """Set logits to -inf where the masks of rows `where` of `work` [R, W] forbid a token. Bit i of a mask, counted
        from the lowest bit of its first byte, allows token i. Tokens beyond the mask's end are forbidden."""
        _, columns = _shape(work)
        index, bits, sizes = _masked(where, masks, work)
        pointers = (work.data_ptr(), index.data_ptr(), addressof(bits), sizes.data_ptr())
        self._allow(CAllowance(*pointers, columns), len(where), is_parallel())

    def largest(self, logits: Tensor, where: Sequence[int], masks: Sequence[bytes | None]) -> tuple[Tensor, Tensor]:
        """Return the largest allowed logit, float32 [n], and its position, int64 [n], of each of the rows `where` of
        `logits` [R, V]. The rows may have any width. Of equal logits, the position of the first one is returned. NaN
        counts as the largest. A largest logit of -inf means that the mask allows no token."""
        if logits.dtype is not torch.float32 or logits.device.type != "cpu" or logits.dim() != 2:
            raise InternalError(f"kernels cannot read {tuple(logits.shape)} {logits.dtype} logits on {logits.device}")
        num_rows, columns = logits.shape
        stride = logits.stride(0)
        if (
            not 0 < columns < _MAX_NUMBERS
            or (columns > 1 and logits.stride(1) != 1)
            or stride < (num_rows > 1) * columns
        ):
            raise InternalError(f"kernels cannot read logits of shape {tuple(logits.shape)}, strides {logits.stride()}")
        index, bits, sizes = _masked(where, masks, logits)
        best, places = torch.empty(len(where), dtype=torch.float32), torch.empty(len(where), dtype=torch.int64)
        given = (logits.data_ptr(), index.data_ptr(), addressof(bits), sizes.data_ptr())
        call = CSearch(*given, best.data_ptr(), places.data_ptr(), stride, columns)
        self._search(call, len(where), is_parallel())
        return best, places

    def draw(
        self,
        work: Tensor,
        where: Sequence[int],
        best: Tensor,
        temperature: Tensor,
        uniform: Tensor,
        cuts: Cuts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sample a token from each of the rows `where` of logits `work` [R, W]. Return the tokens [n], and the total of
        each row's weights, float64 [n, 1]. `best` are the rows' largest logits and `temperature` their temperatures,
        float32 [n]. `uniform` are random numbers in [0, 1), float64 [n]."""
        num_rows, columns = _shape(work)
        count = len(where)
        if not all(0 <= row < num_rows for row in where):
            raise InternalError(f"got the row indices {list(where)} for {num_rows} logits rows")
        check_tensor(best, torch.float32, count, "the largest logits")
        check_tensor(temperature, torch.float32, count, "temperatures")
        check_tensor(uniform, torch.float64, count, "numbers to draw with")
        index = torch.tensor(where, dtype=torch.int64)
        tokens = torch.empty(count, dtype=torch.int64)
        totals = torch.empty(count, 1, dtype=torch.float64)
        sums = torch.empty(count, columns // COLUMNS, dtype=torch.float64)
        top_k = top_p = floors = maxima = None
        if cuts is not None:
            cuts.check(count)
            top_k, top_p = torch.tensor(cuts.top_k, dtype=torch.int64), torch.tensor(cuts.top_p, dtype=torch.float64)
            floors, maxima = cuts.floors, torch.empty(count, columns // COLUMNS, dtype=torch.float32)
        given = (work, best, temperature, uniform, index, top_k, top_p, floors, tokens, totals, sums, maxima)
        pointers = (None if each is None else each.data_ptr() for each in given)
        self._draw(CDraws(*pointers, columns), count, is_parallel())
        return tokens, totals

    def totals(self, work: Tensor, largest: Tensor) -> Tensor:
        """Return the totals [R, 1] of the weights for sampling at temperature 1 from `work` [R, W]; `largest` [R] are
        the largest logits of its rows."""
        num_rows, _ = _shape(work)
        ones, zeros = torch.ones(num_rows, dtype=torch.float32), torch.zeros(num_rows, dtype=torch.float64)
        return self.draw(work, range(num_rows), largest, ones, zeros)[1]

    def survey(self, work: Tensor, tokens: Sequence[int], totals: Tensor, num_best: int) -> Tensor:
        """Return statistics of `tokens`, one token per row of `work` [R, W], as a float64 tensor [R, 4 + 2 num_best].
        Columns: the token's logit and rank; the largest logits, best first; their positions; the maximum; the total
        weight. Ties are in order of position. The maximum is NaN if any logit is NaN. The total weight of a row is
        copied from `totals` [R, 1], or computed if the value in `totals` is negative. The position of a logit of -inf
        is undefined. NaN is never among the largest logits."""
        num_rows, columns = _shape(work)
        if not 0 <= num_best <= min(MAX_BEST, columns):
            raise InternalError(f"the {num_best} best of {columns} logits; kernels find at most {MAX_BEST}")
        if len(tokens) != num_rows or not 0 <= min(tokens) <= max(tokens) < columns:
            raise InternalError(f"got tokens {list(tokens)} for {num_rows} rows of {columns} logits")
        check_tensor(totals, torch.float64, num_rows, "totals")
        index = torch.tensor(tokens, dtype=torch.int64)
        maxima = torch.empty(num_rows, columns // COLUMNS, dtype=torch.float32)
        told = torch.empty(num_rows, 4 + 2 * num_best, dtype=torch.float64)
        given = (work, index, totals, maxima, told)
        self._survey(CSurvey(*(each.data_ptr() for each in given), columns, num_best), num_rows, is_parallel())
        return told


def _masked(where: Sequence[int], masks: Sequence[bytes | None], work: Tensor) -> tuple[Tensor, Any, Tensor]:
    """Return the row indices, pointers to the masks, and the masks' sizes in bytes, for rows `where` of `work`."""
    if len(where) != len(masks) or not all(0 <= row < work.shape[0] for row in where):
        raise InternalError(f"got {len(masks)} masks for the row indices {list(where)} of {work.shape[0]} logits rows")
    pointers = (c_char_p * len(masks))(*masks)  # keeps the masks alive
    sizes = torch.tensor([0 if mask is None else len(mask) for mask in masks], dtype=torch.int64)
    return torch.tensor(where, dtype=torch.int64), pointers, sizes


def _shape(work: Tensor) -> tuple[int, int]:
    num_rows, columns = work.shape
    check_tensor(work, torch.float32, num_rows * columns, "logits")
    if columns % COLUMNS or not 0 < columns < _MAX_NUMBERS:
        raise InternalError(f"rows have {columns} logits; kernels need a multiple of {COLUMNS}")
    return num_rows, columns
