"""The working matrix of a step: one private float32 copy of a logits row per sampled row, with bias and
masks.

Its width is padded to whole chunks, and padding counts as forbidden: nothing downstream depends on the width
that a model happens to pad its vocabulary to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bridle.engine.plan import SampleRow
from bridle.sampling import SamplingParams

#: Columns are padded to a multiple of this; the draw works chunk by chunk.
CHUNK = 256

_NEVER = float("-inf")
_CACHED_BIASES = 64


def gather(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Copies of rows `indices` of `logits` [R, V], float32 [len(indices), V rounded up to whole chunks]."""
    vocab = logits.shape[-1]
    width = -(-vocab // CHUNK) * CHUNK
    work = torch.empty(len(indices), width, dtype=torch.float32, device=logits.device)
    work[:, :vocab] = pick(logits, indices)
    work[:, vocab:] = _NEVER
    return work


def pick(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Rows `indices` of `logits`; a view where they are a run."""
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        return logits[first : first + len(indices)]
    return logits.index_select(0, torch.tensor(indices, device=logits.device))


# -- bias ----------------------------------------------------------------------------------------------------

_Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class BiasTable:
    """Adds logit biases. The arrays of a `SamplingParams` are built once, not at every step."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[int, tuple[SamplingParams, _Pairs]] = OrderedDict()

    def apply(self, work: torch.Tensor, rows: Sequence[SampleRow], vocab: int) -> None:
        """Add the request's `logit_bias` and then the row's own `bias`, in place. Tokens outside the
        vocabulary are ignored."""
        self._add(
            work,
            [(i, self._of(row.sampling)) for i, row in enumerate(rows) if row.sampling.logit_bias],
            vocab,
        )
        self._add(work, [(i, _arrays(row.bias)) for i, row in enumerate(rows) if row.bias], vocab)

    def _of(self, sampling: SamplingParams) -> _Pairs:
        known = self._arrays.get(id(sampling))
        if known is None:
            known = (sampling, _arrays(tuple(sampling.logit_bias.items())))
            self._arrays[id(sampling)] = known  # holds the object, so its id cannot be reused meanwhile
            if len(self._arrays) > _CACHED_BIASES:
                self._arrays.popitem(last=False)
        else:
            self._arrays.move_to_end(id(sampling))
        return known[1]

    @staticmethod
    def _add(work: torch.Tensor, entries: list[tuple[int, _Pairs]], vocab: int) -> None:
        if not entries:
            return
        row = np.concatenate([np.full(len(tokens), i) for i, (tokens, _) in entries])
        token = np.concatenate([tokens for _, (tokens, _) in entries])
        value = np.concatenate([values for _, (_, values) in entries])
        known = (token >= 0) & (token < vocab)
        where = (to_device(row[known], work.device), to_device(token[known], work.device))
        work.index_put_(where, to_device(value[known], work.device), accumulate=True)


def _arrays(pairs: Sequence[tuple[int, float]]) -> _Pairs:
    """Token and value arrays; values of a token named twice are added up here, in order."""
    total: dict[int, float] = {}
    for token, value in pairs:
        total[token] = total.get(token, 0.0) + value
    return np.fromiter(total, np.int64, len(total)), np.fromiter(total.values(), np.float32, len(total))


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


# -- masks ---------------------------------------------------------------------------------------------------


def apply_masks(work: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Forbid, in place, every token that its row's mask does not allow. Tokens past a mask's end are
    forbidden."""
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    width = work.shape[1]
    packed = np.zeros((len(masked), width // 8), dtype=np.uint8)  # CHUNK is a multiple of 8
    for slot, i in enumerate(masked):
        bits = np.frombuffer(rows[i].mask or b"", dtype=np.uint8)[: width // 8]
        packed[slot, : len(bits)] = bits
    allowed = _unpack(packed, work.device)  # [len(masked), width]
    if len(masked) == len(rows):
        work.masked_fill_(~allowed, _NEVER)
        return
    where = torch.tensor(masked, device=work.device)
    work[where] = work[where].masked_fill_(~allowed, _NEVER)


def _unpack(packed: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Bits to booleans, least significant first. On a GPU after the transfer, which is then 8 times
    smaller."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_))
    bits = to_device(packed, device).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device)
    return (bits & 1).bool().flatten(1)
