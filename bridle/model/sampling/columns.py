"""Packs the parameters of the sampling kernels into one array of 32-bit words for one upload. The array has the
parameters of rows as columns, the token histories for penalties, and the biases of tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bridle.cpu_kernels.sampling import MAX_BEST
from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.sampling.gpu_token_history import DeviceTokenHistory
from bridle.model.sampling.param_flags import kind_of
from bridle.model.sampling.penalties import Histories
from bridle.model.sampling.rows import Pairs, pairs_of
from bridle.sampling import SamplingParams
from bridle.sampling_values import LogitBias

#: Number of integers and floats for a row, and of words for a span. `draw_kernels` reads them in this order.
INTS, FLOATS, SPAN = 8, 5, 5
_ALIGNED = 4  # words: each section begins at a multiple of 16 bytes
_CACHED = 4096
_SMALLEST_TEMPERATURE = 1e-30  # float32 cannot divide by smaller numbers
_WORD = (1 << 64) - 1

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Fixed:
    """Sampling parameters that are constant for a request, as the kernels need them. If `is_rare`, the standard sampler
    must sample the rows."""

    sampling: SamplingParams  # kept alive, so that its id is not reused
    floats: tuple[float, float, float, float, float]
    bias: Pairs | None
    is_rare: bool
    is_greedy: bool


def fixed_of(sampling: SamplingParams) -> Fixed:
    """Derive the constant parameters of a request from its sampling parameters."""
    kind = kind_of(sampling)
    is_rare = kind.is_bent and not kind.is_greedy
    is_rare |= sampling.has_dry or sampling.watermark is not None or isinstance(sampling.logit_bias, LogitBias)
    temperature = 0.0 if kind.is_greedy else max(sampling.temperature, _SMALLEST_TEMPERATURE)
    floor = torch.tensor(sampling.min_p, dtype=torch.float32).log().item()  # the largest logit is 0
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    bias = None if is_rare or not sampling.logit_bias else pairs_of(tuple(sampling.logit_bias.items()))
    return Fixed(sampling, (temperature, floor, *penalties), bias, is_rare, kind.is_greedy)


class FixedTable:
    """A cache of `Fixed`, keyed by the sampling parameters object, which is the same at every step of a request."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Fixed] = OrderedDict()

    def of(self, sampling: SamplingParams) -> Fixed:
        known = self._known.get(id(sampling))
        if known is None:
            known = self._known[id(sampling)] = fixed_of(sampling)
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return known

    def is_rare(self, row: SampleRow, vocab: int) -> bool:
        """Return whether the kernels do not support this row, so that the standard sampler must sample it. `vocab` is
        the number of logits."""
        fixed = self.of(row.sampling)
        is_long = MAX_BEST < row.sampling.top_k < vocab and not fixed.is_greedy
        return fixed.is_rare or is_long or row.num_traced > 0


class Section(NamedTuple):
    """The words from `start` to `stop` (exclusive) of the array."""

    start: int
    stop: int


@dataclass(slots=True)
class Columns:
    """The array of words for some rows, and its sections. `told` are the rows that report log-probabilities, each with
    at most `num_best` best tokens. `cut` are the rows with top-k or top-p."""

    words: Words
    doubles: Section
    longs: Section
    ints: Section
    floats: Section
    histories: Section
    biases: Section
    cut_rows: Section
    told_rows: Section
    longest_history: int
    longest_bias: int
    cut: list[int]
    told: list[int]
    num_best: int
    has_draws: bool


class _Writer:
    """Builds an array of words, section by section."""

    def __init__(self) -> None:
        self._parts: list[Words] = []
        self._size = 0

    def add(self, values: npt.NDArray[np.generic]) -> Section:
        words = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        start, stop = self._size, self._size + len(words)
        padding = -stop % _ALIGNED
        self._parts += [words, np.zeros(padding, np.int32)] if padding else [words]
        self._size = stop + padding
        return Section(start, stop)

    def words(self) -> Words:
        return np.concatenate(self._parts)


def columns_of(
    rows: Sequence[SampleRow],
    fixed: Sequence[Fixed],
    mask_slots: Sequence[int],
    vocab: int,
    histories: Histories,
    kept: DeviceTokenHistory,
    history: HistoryLookup,
) -> Columns:
    """Pack the parameters of `rows` for the kernels. The mask of row i is in slot `mask_slots[i]` (-1: no mask)."""
    params = [row.sampling for row in rows]
    ints = _ints(rows, mask_slots, vocab)
    cut = [i for i, p in enumerate(params) if (ints[i, 5] or p.top_p < 1.0) and not fixed[i].is_greedy]
    ints[cut, 6] = range(len(cut))
    told = [i for i, p in enumerate(params) if p.logprobs is not None]
    writer = _Writer()
    draws = [number & _WORD for row in rows for number in (row.key, row.draw)]
    doubles = writer.add(np.array([p.top_p for p in params]))
    longs = writer.add(np.array(draws, np.uint64))
    floats = writer.add(np.array([each.floats for each in fixed], np.float32))
    spans, longest_history = _write_histories(writer, rows, ints, histories, kept, history)
    addends, longest_bias = _write_biases(writer, rows, fixed, ints)
    return Columns(
        doubles=doubles,
        longs=longs,
        floats=floats,
        histories=writer.add(spans),
        biases=writer.add(addends),
        ints=writer.add(ints),
        cut_rows=writer.add(np.array(cut, np.int32)),
        told_rows=writer.add(np.array([(i, params[i].logprobs_mode == "processed") for i in told], np.int32)),
        words=writer.words(),
        longest_history=longest_history,
        longest_bias=longest_bias,
        cut=cut,
        told=told,
        num_best=min(vocab, max([1] + [params[i].logprobs or 0 for i in told])),
        has_draws=not all(each.is_greedy for each in fixed),
    )


def _ints(rows: Sequence[SampleRow], mask_slots: Sequence[int], vocab: int) -> Words:
    """Return the integer parameters of rows, except the slots of optional features, which are set later."""
    ints = np.full((len(rows), INTS), -1, np.int32)
    ints[:, 0] = [row.logits_index for row in rows]
    ints[:, 1] = mask_slots
    ints[:, 5] = [row.sampling.top_k if 0 < row.sampling.top_k < vocab else 0 for row in rows]
    return ints


def _write_histories(
    writer: _Writer,
    rows: Sequence[SampleRow],
    ints: Words,
    histories: Histories,
    kept: DeviceTokenHistory,
    history: HistoryLookup,
) -> tuple[Words, int]:
    """Write the tokens that penalties need and that the device does not have yet. Return one span per history,
    [histories, SPAN], and the length of the longest history. A span has the start of the new tokens, the number of
    prompt tokens, and the number of all tokens. A span also has the number of tokens that are already on the device,
    and the position of these tokens."""
    asked = [i for i, row in enumerate(rows) if row.sampling.has_penalties]
    found = [history(rows[i]) for i in asked]
    arrays = [histories.array(rows[i].seq_id, tokens) for i, (tokens, _) in zip(asked, found, strict=True)]
    lengths = [len(array) for array in arrays]
    places = kept.place([histories.known(rows[i].seq_id) for i in asked], lengths)
    spans: list[tuple[int, int, int, int, int]] = []
    for i, array, (_, num_prompt), place in zip(asked, arrays, found, places, strict=True):
        section = writer.add(array[place.num_kept :].astype(np.int32))
        ints[i, 2] = len(spans)
        spans.append((section.start, num_prompt, len(array), place.num_kept, place.base))
    return np.array(spans, np.int32).reshape(-1, SPAN), max([0, *lengths])


def _write_biases(writer: _Writer, rows: Sequence[SampleRow], fixed: Sequence[Fixed], ints: Words) -> tuple[Words, int]:
    """Write the biases of requests and of single rows. Return one span per bias, [biases, SPAN], and the length of the
    longest bias."""
    spans: list[tuple[int, int, int, int, int]] = []
    for i, row in enumerate(rows):
        for place, pairs in ((3, fixed[i].bias), (4, pairs_of(row.bias) if row.bias else None)):
            if pairs is not None:
                tokens, values = pairs
                section = writer.add(np.concatenate([_small(tokens), values.view(np.int32)]))
                ints[i, place] = len(spans)
                spans.append((section.start, len(tokens), 0, 0, 0))
    return np.array(spans, np.int32).reshape(-1, SPAN), max([0] + [span[1] for span in spans])


def _small(tokens: npt.NDArray[np.int64]) -> Words:
    """Return tokens as 32-bit integers. Ids too large for 32 bits become -1, because they are not in the vocabulary."""
    return np.where((tokens >= 0) & (tokens < 1 << 31), tokens, -1).astype(np.int32)
