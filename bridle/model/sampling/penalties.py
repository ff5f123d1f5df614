"""Repetition, presence and frequency penalties for the tokens that a sequence already has. Token lists are converted to
arrays incrementally. If a sequence grew by one token since the last step, only this token is converted. Earlier tokens
are only compared with the tokens that were converted before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.h2d_copies import upload, upload_list

_CACHED_SEQUENCES = 512
_SPARE = 64

IntArray = npt.NDArray[np.int64]


class Known:
    """The tokens that a sequence had when it was last sampled: as a list for comparison, and as an array for
    computation. `row`, `num_kept` and `last_step` are used by `DeviceTokenHistory`."""

    __slots__ = ("_array", "_tokens", "last_step", "num_kept", "row")

    def __init__(self) -> None:
        self.row = self.num_kept = self.last_step = 0
        self._tokens: list[int] = []
        self._array: IntArray = np.empty(_SPARE, dtype=np.int64)

    def follow(self, tokens: Sequence[int]) -> IntArray | None:
        """Return `tokens` as an array if they begin with the known tokens, otherwise None. After this method returned
        None, the object must not be used again."""
        known, start, size = self._tokens, len(self._tokens), len(tokens)
        known.extend(tokens[start:])
        if known != (tokens if isinstance(tokens, list) else list(tokens)):
            return None  # rolled back, or another sequence with the same id
        if size > len(self._array):
            self._array = np.concatenate([self._array, np.empty(size, dtype=np.int64)])
        self._array[start:size] = known[start:]
        return self._array[:size]


class Histories:
    """A cache of token arrays by sequence, for the most recently sampled sequences."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Known] = OrderedDict()

    def array(self, seq_id: int, tokens: Sequence[int]) -> IntArray:
        """Return `tokens` as an array, which is valid until the next call for this sequence. A numpy array is returned
        without a copy."""
        given: object = tokens
        if isinstance(given, np.ndarray):
            return given.astype(np.int64, copy=False)
        known = self._known.pop(seq_id, None)
        array = known.follow(tokens) if known is not None else None
        if known is None or array is None:
            known = Known()
            array = known.follow(tokens)
            assert array is not None  # no tokens are known, so any tokens continue them
        self._known[seq_id] = known
        if len(self._known) > _CACHED_SEQUENCES:
            self._known.popitem(last=False)
        return array

    def known(self, seq_id: int) -> Known | None:
        """Return the known tokens of a sequence; None if the sequence is not in the cache."""
        return self._known.get(seq_id)

    def apply(self, work: torch.Tensor, rows: Sequence[SampleRow], history: HistoryLookup, vocab: int) -> None:
        """Penalize, in place, the tokens that each row's sequence already has. `work` is [len(rows), W]."""
        repeated: list[tuple[int, IntArray, float]] = []
        counted: list[tuple[int, IntArray, float, float]] = []
        for i in [i for i, row in enumerate(rows) if row.sampling.has_penalties]:
            sampling = rows[i].sampling
            tokens, num_prompt = history(rows[i])
            array = self.array(rows[i].seq_id, tokens)
            if sampling.repetition_penalty != 1.0:
                repeated.append((i, _known_to(array, vocab), sampling.repetition_penalty))
            if sampling.presence_penalty or sampling.frequency_penalty:
                output = _known_to(array[num_prompt:], vocab)
                counted.append((i, output, sampling.presence_penalty, sampling.frequency_penalty))
        if repeated:
            _multiply(work, repeated)
        if counted:
            _subtract(work, counted)


def _known_to(array: IntArray, vocab: int) -> IntArray:
    """Return the token ids below `vocab`, because only these have logits."""
    inside = (array >= 0) & (array < vocab)
    return array if bool(inside.all()) else array[inside]


def _multiply(work: torch.Tensor, entries: list[tuple[int, IntArray, float]]) -> None:
    """Apply the repetition penalty: divide positive logits by it, and multiply negative logits. All logits are read
    before one is written, so a token that occurs twice in the history is penalized once."""
    flat = np.concatenate([i * work.shape[1] + tokens for i, tokens, _ in entries])
    factors = np.concatenate([np.full(len(tokens), p, np.float32) for _, tokens, p in entries])
    index, factor = upload(flat, work.device), upload(factors, work.device)
    seen = work.view(-1)[index]
    work.view(-1)[index] = torch.where(seen > 0, seen / factor, seen * factor)


def _subtract(work: torch.Tensor, entries: list[tuple[int, IntArray, float, float]]) -> None:
    """Subtract `presence` from the logit of each token in the history, and `frequency` per occurrence."""
    width = work.shape[1]
    flat = np.concatenate([slot * width + tokens for slot, (_, tokens, _, _) in enumerate(entries)])
    counts = work.new_zeros(len(entries), width)
    counts.view(-1).index_add_(0, upload(flat, work.device), work.new_ones(len(flat)))
    presence = upload_list([[p] for _, _, p, _ in entries], work.dtype, work.device)  # [entries, 1]
    frequency = upload_list([[f] for _, _, _, f in entries], work.dtype, work.device)
    where = upload_list([i for i, _, _, _ in entries], torch.int64, work.device)
    work[where] = work[where] - (counts * frequency + (counts > 0) * presence)
