"""Samples on a GPU by bridle's Triton kernels, from logits on the device to results in host memory. All parameters are
uploaded in one copy, and all results are downloaded in one copy. The host does not wait in between. The kernels read a
row directly from the model's output. Each kernel applies bias, mask and penalties to a logit when it reads it, because
that is faster than writing a changed matrix. Changed logits are written to memory only for rows with top-k, top-p or
log-probabilities, whose best tokens are searched for.

1. `count_tokens` and `place_biases`: tables over the vocabulary, for rows with penalties or biases.
2. `find_peaks`: the largest logit of each part of a row.
3. `weigh_parts`: the weight of each part, as an integer. In rows with top-k or top-p, `find_edges` finds the smallest
   logit to keep, and `weigh_parts` runs again.
4. `pick`: the sampled token, selected by the row's random number from the weights.
5. `copy_told` and `tell`: the best tokens and ranks, for rows that report log-probabilities.

Integers have the same sum in any order of addition, so a row's token does not depend on the other rows of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bridle.cpu_kernels.sampling import MAX_BEST
from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.lora.fused import Machine
from bridle.model.h2d_copies import Download, upload
from bridle.model.sampling.columns import SPAN, Columns, Fixed, Section, columns_of
from bridle.model.sampling.fixed_point_probs import UNIT
from bridle.model.sampling.gpu_token_history import DeviceTokenHistory
from bridle.model.sampling.logprobs import place_of
from bridle.model.sampling.mask_ring import MaskRing
from bridle.model.sampling.penalties import Histories
from bridle.outputs import Logprob

#: Columns of a part, and tokens of a history or a bias that one program processes.
PART, BLOCK = 4096, 1024
#: Products are fused only where a kernel does so explicitly, so that every GPU gives the same bits.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_MIN_BLOCK = 16
_ALIGNED = 16  # bytes


class SampleField(NamedTuple):
    """A field of the result buffer: its first byte, type and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.dtype.itemsize * int(np.prod(self.shape))

    def of(self, data: Tensor) -> Tensor:
        """Return a view of this field in the bytes of a result buffer."""
        return data[self.start : self.stop].view(self.dtype).view(self.shape)


class SampleLayout:
    """The fields of the result buffer, which is downloaded in one copy."""

    def __init__(self, num_rows: int, num_told: int, num_parts: int, num_best: int) -> None:
        self.num_bytes = 0
        self.tokens = self._field(torch.int64, num_rows)
        self.chosen = self._field(torch.float32, num_told)
        self.sums = self._field(torch.int64, num_told, num_parts)
        self.ranks = self._field(torch.int64, num_told, num_parts)
        self.best = self._field(torch.int64, num_told, num_best)

    def _field(self, dtype: torch.dtype, *shape: int) -> SampleField:
        field = SampleField(self.num_bytes, dtype, shape)
        self.num_bytes = field.stop + -field.stop % _ALIGNED
        return field


class DeviceDraws:
    """Sampling in progress on the device; `take` waits for the results."""

    def __init__(self, rows: Sequence[SampleRow], told: Sequence[int], answer: SampleLayout, data: Tensor) -> None:
        self._rows, self._told, self._answer = rows, told, answer
        self.tokens = answer.tokens.of(data)  # [rows], on the device; valid once the sampling is done there
        self._download = Download(data)

    def take(self) -> tuple[list[int], list[Logprob | None]]:
        """Wait for the tokens and their log-probabilities, and return them."""
        data = self._download.wait()
        tokens: list[int] = self._answer.tokens.of(data).tolist()
        logprobs: list[Logprob | None] = [None] * len(tokens)
        for i, values in zip(self._told, self._places(data), strict=True):
            if tokens[i] >= 0:
                logprobs[i] = Logprob(tokens[i], *place_of(values, self._rows[i].sampling.logprobs or 0))
        return tokens, logprobs

    def _places(self, data: Tensor) -> list[list[float]]:
        """Return the values from which `place_of` makes log-probabilities, one list for each row that reports them."""
        if not self._told:
            return []
        answer = self._answer
        best, places = _read_keys(answer.best.of(data).numpy())
        with np.errstate(divide="ignore", invalid="ignore"):  # rows from which no token can be sampled
            norms = best[:, :1] + np.log(answer.sums.of(data).sum(1, keepdim=True).double().numpy() / UNIT)
            chosen = answer.chosen.of(data).double().numpy()[:, None] - norms
            ranks = answer.ranks.of(data).sum(1, keepdim=True).double().numpy() + 1
            found: list[list[float]] = np.concatenate([chosen, ranks, best - norms, places], 1).tolist()
        return found


class Drawer:
    """Starts sampling on one device."""

    def __init__(self, device: torch.device) -> None:
        self._machine = Machine(device)
        self._histories = Histories()
        self._kept = DeviceTokenHistory(device)
        self._ring = MaskRing(device)

    @cached_property
    def kernels(self) -> Any:
        """Return the module of Triton kernels. The import takes a moment, and needs Triton."""
        from bridle.model.sampling import draw_kernels

        return draw_kernels

    def start(
        self, logits: Tensor, rows: Sequence[SampleRow], fixed: Sequence[Fixed], history: HistoryLookup
    ) -> DeviceDraws:
        """Start sampling a token for each of `rows` from `logits` [R, V], without waiting for the device. The kernels
        must support all rows (see `is_rare`)."""
        vocab = logits.shape[1]
        with self._machine.chosen():
            slots = self._ring.place([row.mask for row in rows], vocab)
            columns = columns_of(rows, fixed, slots, vocab, self._histories, self._kept, history)
            step = DrawStep(self.kernels, logits, len(rows), columns, self._ring.masks, self._kept.words)
            step.run()
            self._kept.keep()
            self._ring.release()
            return DeviceDraws(rows, columns.told, step.answer, step.data)


class DrawStep:
    """Launches the sampling kernels for some rows. The kernels' arguments are collected by name."""

    def __init__(
        self, kernels: Any, logits: Tensor, num_rows: int, columns: Columns, masks: Tensor, kept: Tensor
    ) -> None:
        self._kernels, self._columns, self._device = kernels, columns, logits.device
        self._num_rows, self._vocab = num_rows, logits.shape[1]
        self._num_parts = -(-self._vocab // PART)
        self.answer = SampleLayout(num_rows, len(columns.told), self._num_parts, columns.num_best)
        self.data = self._empty(torch.uint8, self.answer.num_bytes)
        self._given: dict[str, Any] = {
            "logits": logits.contiguous(),
            "masks": masks,
            "kept": kept,
            "mask_words": masks.shape[-1],
            "tokens": self.answer.tokens.of(self.data),
            "vocab": self._vocab,
            "num_parts": self._num_parts,
            "num_heads": min(MAX_BEST, self._vocab),
            "num_best": columns.num_best,
            "part": PART,
            "block": BLOCK,
            "block_parts": block_of(self._num_parts),
            "block_heads": MAX_BEST,
        }
        self._read_columns()
        self._make_scratch()

    def run(self) -> None:
        self._fill_tables()
        grid = (self._num_rows, self._num_parts)
        self.launch("find_peaks", *grid)
        if self._columns.cut:
            self.launch("weigh_parts", *grid, is_last=False)
            self._given["heads"] = self._given["work"].topk(self._given["num_heads"]).values
            self.launch("find_edges", len(self._columns.cut))
        if self._columns.has_draws:
            self.launch("weigh_parts", *grid, is_last=True)
        self.launch("pick", self._num_rows)
        if self._columns.told:
            self._tell()

    def _read_columns(self) -> None:
        words, columns = upload(self._columns.words, self._device), self._columns
        self._given |= {
            "words": words,
            "doubles": _part_of(words, columns.doubles).view(torch.float64),
            "longs": _part_of(words, columns.longs).view(torch.int64),
            "ints": _part_of(words, columns.ints),
            "floats": _part_of(words, columns.floats).view(torch.float32),
            "histories": _part_of(words, columns.histories),
            "addends": _part_of(words, columns.biases),
            "cut_rows": _part_of(words, columns.cut_rows),
            "told": _part_of(words, columns.told_rows),
        }

    def _make_scratch(self) -> None:
        shape, num_cut = (self._num_rows, self._num_parts), len(self._columns.cut)
        self._given |= {
            "peaks": self._empty(torch.float32, *shape),
            "places": self._empty(torch.int32, *shape),
            "sums": self._empty(torch.int64, *shape),
            "equals": self._empty(torch.int32, *shape),
            "work": self._empty(torch.float32, num_cut, self._vocab),
            "edges": self._empty(torch.float32, num_cut),
            "rooms": self._empty(torch.int64, num_cut),
        }

    def _fill_tables(self) -> None:
        columns = self._columns
        for kernel, name, table, dtype, longest in (
            ("count_tokens", "histories", "counts", torch.int32, columns.longest_history),
            ("place_biases", "addends", "biases", torch.float32, columns.longest_bias),
        ):
            num_spans = self._given[name].shape[0] // SPAN
            self._given[table] = self._empty(dtype, num_spans, self._vocab)
            if num_spans:
                self._given[table].zero_()
                if longest:
                    self.launch(kernel, num_spans, -(-longest // BLOCK))

    def _tell(self) -> None:
        num_told, answer, given = len(self._columns.told), self.answer, self._given
        given["keys"] = self._empty(torch.int64, num_told, self._vocab)
        self.launch("copy_told", num_told, self._num_parts)
        best = answer.best.of(self.data)
        torch.topk(given["keys"], self._columns.num_best, out=(best, torch.empty_like(best)))
        given |= {"best": best, "chosen": answer.chosen.of(self.data)}
        given |= {"told_sums": answer.sums.of(self.data), "ranks": answer.ranks.of(self.data)}
        self.launch("tell", num_told, self._num_parts)

    def launch(self, name: str, *grid: int, **more: Any) -> None:
        kernel, given = getattr(self._kernels, name), self._given | more
        kernel[grid](**{each: given[each] for each in kernel.arg_names}, **OPTIONS)

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return an uninitialized tensor on the device. Sizes of 0 are raised to 1, because a kernel always needs a
        valid pointer."""
        return torch.empty(shape if all(shape) else (_MIN_BLOCK,), dtype=dtype, device=self._device)


def _read_keys(keys: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Decode keys [n, k] to logits and columns."""
    bits = (keys >> 32).astype(np.int32)
    logits = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int32).view(np.float32)
    return logits.astype(np.float64), (0x7FFFFFFF - (keys & 0xFFFFFFFF)).astype(np.float64)


def _part_of(words: Tensor, section: Section) -> Tensor:
    return words[section.start : section.stop]


def block_of(number: int) -> int:
    """Return the smallest power of two that is at least `number` and at least the minimum block size."""
    return max(_MIN_BLOCK, 1 << (number - 1).bit_length())
