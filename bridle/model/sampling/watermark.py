"""The green-list watermark of Kirchenbauer et al. (arXiv 2301.10226). Half of the vocabulary, chosen by a hash of the
previous token, gets a small bonus. So text of the model can later be distinguished from other text. Without a key, the
green tokens are chosen as in text-generation-inference, with the seed 15485863 times the previous token. Detectors that
were made for text-generation-inference therefore work. With a key, the green tokens are chosen by `bridle.watermark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.watermark import FACTOR, FIRST, GOLDEN, SECOND, limit_of, seed_of

_HASH_KEY = 15485863
_CACHED_LISTS = 64
_CACHED_HASHES = 4  # one for each vocabulary and device


def apply_watermarks(work: torch.Tensor, rows: Sequence[SampleRow], history: HistoryLookup, vocab: int) -> None:
    """Add the bonus, in place, to the green tokens of the rows that request a watermark. `work` is [len(rows), W]."""
    for i, row in enumerate(rows):
        mark = row.sampling.watermark
        if mark is None:
            continue
        tokens, _ = history(row)
        if mark.key:
            if len(tokens) >= mark.context:
                last = [int(token) for token in tokens[len(tokens) - mark.context :]]
                work[i, :vocab] += keyed_green_list(mark.key, last, vocab, mark.gamma, work.device) * mark.delta
        elif len(tokens):
            green = _green_list(int(tokens[-1]), vocab, mark.gamma)
            work[i, :vocab] += green.to(work.device) * mark.delta


def keyed_green_list(key: str, last: Sequence[int], vocab: int, gamma: float, device: torch.device) -> torch.Tensor:
    """Return `bridle.watermark.is_green` for each token, bool [vocab] on `device`. The computation uses 64-bit integers
    with overflow."""
    value = _hashes(vocab, device).bitwise_xor(_signed(seed_of(key, last))).mul_(_signed(FACTOR))
    return value < limit_of(gamma)


@lru_cache(_CACHED_HASHES)
def _hashes(vocab: int, device: torch.device) -> torch.Tensor:
    """Return `bridle.watermark.hash_of` for each token, int64 [vocab]."""
    value = torch.arange(1, vocab + 1, dtype=torch.int64, device=device).mul_(_signed(GOLDEN))
    for shift, factor in ((30, FIRST), (27, SECOND)):
        value.bitwise_xor_(_shifted(value, shift)).mul_(_signed(factor))
    return value.bitwise_xor_(_shifted(value, 31))


def _shifted(value: torch.Tensor, places: int) -> torch.Tensor:
    """Shift `value` logically to the right by `places` bits. The shift of torch would keep the sign."""
    return (value >> places).bitwise_and_((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    """Return the signed integer that has the same 64 bits as `value`."""
    return value - (1 << 64) if value >> 63 else value


@lru_cache(_CACHED_LISTS)
def _green_list(previous: int, vocab: int, gamma: float) -> torch.Tensor:
    """Return 1 for each green token and 0 for each other token, [vocab]. The green tokens are chosen on the CPU, so
    that they do not depend on the device."""
    generator = torch.Generator().manual_seed(_HASH_KEY * previous)
    green = torch.zeros(vocab, dtype=torch.float32)
    green[torch.randperm(vocab, generator=generator)[: int(vocab * gamma)]] = 1.0
    return green
