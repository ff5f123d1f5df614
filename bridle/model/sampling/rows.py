"""The working matrix of a step: one private float32 copy of a logits row per sampled row, with bias and
masks.

The matrix's width is padded to whole chunks, and padding is never sampled. Sampling therefore does not depend on how
far a model pads its vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from bridle.cpu_kernels.library import sampling_kernels
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.model.h2d_copies import upload, upload_list
from bridle.sampling import SamplingParams
from bridle.sampling_values import LogitBias

#: Columns are padded to a multiple of this number; the draw works chunk by chunk.
CHUNK = 256

_NEVER = float("-inf")
_CACHED_BIASES = 64


def gather(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Return copies of rows `indices` of `logits` [R, V], float32 [len(indices), V rounded up to whole chunks]."""
    vocab = logits.shape[-1]
    width = -(-vocab // CHUNK) * CHUNK
    work = torch.empty(len(indices), width, dtype=torch.float32, device=logits.device)
    work[:, :vocab] = pick(logits, indices)
    work[:, vocab:] = _NEVER
    return work


def pick(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Return rows `indices` of `logits`; a view if they are contiguous."""
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        return logits[first : first + len(indices)]
    return logits.index_select(0, upload_list(indices, torch.int64, logits.device))


# -- bias ----------------------------------------------------------------------------------------------------

Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
#: A bias that covers more than one in this many tokens is stored as a whole row.
_DENSE_SHARE = 16


class BiasTable:
    """Adds logit biases. The arrays of a `SamplingParams` are built once, not at every step. A bias for a large part of
    the vocabulary is stored as a full row."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[int, tuple[SamplingParams, Pairs | torch.Tensor]] = OrderedDict()

    def apply(self, work: torch.Tensor, rows: Sequence[SampleRow], vocab: int) -> None:
        """Add the request's `logit_bias` and then the row's own `bias`, in place. Tokens outside the
        vocabulary are ignored."""
        pairs: list[tuple[int, Pairs]] = []
        for i, row in enumerate(rows):
            known = self._of(row.sampling, work, vocab) if row.sampling.logit_bias else None
            if isinstance(known, torch.Tensor):
                work[i, :vocab] += known
            elif known is not None:
                pairs.append((i, known))
        self._add(work, pairs, vocab)
        self._add(work, [(i, pairs_of(row.bias)) for i, row in enumerate(rows) if row.bias], vocab)

    def _of(self, sampling: SamplingParams, work: torch.Tensor, vocab: int) -> Pairs | torch.Tensor:
        known = self._arrays.get(id(sampling))
        if known is None:
            known = (sampling, _prepared(sampling.logit_bias, work, vocab))
            self._arrays[id(sampling)] = known  # keeps the object alive, so that its id is not reused
            if len(self._arrays) > _CACHED_BIASES:
                self._arrays.popitem(last=False)
        else:
            self._arrays.move_to_end(id(sampling))
        return known[1]

    @staticmethod
    def _add(work: torch.Tensor, entries: list[tuple[int, Pairs]], vocab: int) -> None:
        if not entries:
            return
        row = np.concatenate([np.full(len(tokens), i) for i, (tokens, _) in entries])
        token = np.concatenate([tokens for _, (tokens, _) in entries])
        value = np.concatenate([values for _, (_, values) in entries])
        known = (token >= 0) & (token < vocab)
        where = (upload(row[known], work.device), upload(token[known], work.device))
        work.index_put_(where, upload(value[known], work.device), accumulate=True)


def _prepared(bias: Mapping[int, float], work: torch.Tensor, vocab: int) -> Pairs | torch.Tensor:
    """Return a bias as arrays of tokens and values. A bias with many tokens is returned as a row [V] on the device of
    `work`."""
    if not isinstance(bias, LogitBias):
        return pairs_of(tuple(bias.items()))
    tokens = np.frombuffer(bias.tokens, np.int64)
    values = np.frombuffer(bias.addends, np.float64).astype(np.float32)
    if len(tokens) * _DENSE_SHARE <= vocab:
        return tokens, values
    known = tokens < vocab
    dense = np.zeros(vocab, np.float32)
    dense[tokens[known]] = values[known]
    return upload(dense, work.device)


def pairs_of(pairs: Sequence[tuple[int, float]]) -> Pairs:
    """Return a bias as arrays of token ids and values. If a token occurs several times in `pairs`, the token's values
    are added in order."""
    total: dict[int, float] = {}
    for token, value in pairs:
        total[token] = total.get(token, 0.0) + value
    return np.fromiter(total, np.int64, len(total)), np.fromiter(total.values(), np.float32, len(total))


# -- masks ---------------------------------------------------------------------------------------------------


def apply_masks(work: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Set the logits of tokens that the row's mask does not allow to -inf, in place. Tokens beyond a mask's end are
    forbidden."""
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    if (found := sampling_kernels(work)) is not None:
        found.allow(work, masked, [rows[i].mask or b"" for i in masked])
        return
    width = work.shape[1]
    packed = np.zeros((len(masked), width // 8), dtype=np.uint8)  # CHUNK is a multiple of 8
    for slot, i in enumerate(masked):
        bits = np.frombuffer(rows[i].mask or b"", dtype=np.uint8)[: width // 8]
        packed[slot, : len(bits)] = bits
    forbidden = _unpack(~packed, work.device)  # [len(masked), width]; inverted while the bits are packed
    if len(masked) == len(rows):
        work.masked_fill_(forbidden, _NEVER)
        return
    where = upload_list(masked, torch.int64, work.device)
    work[where] = work[where].masked_fill_(forbidden, _NEVER)


def _unpack(packed: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Convert bits to booleans, the least significant bit first. On a GPU, bits are converted after the transfer, which
    makes the transfer 8 times smaller."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_))
    bits = upload(packed, device).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device)
    return (bits & 1).bool().flatten(1)
