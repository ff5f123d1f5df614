"""Random numbers as a pure function of a key and a draw number: SplitMix64 over a hashed key. There is no generator
state. So a sequence can be moved, resumed or replayed, and other sequences of the batch cannot change its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniforms(keys: Sequence[int], draws: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (key, draw) pair, a multiple of 2**-53. Integers of any size are taken modulo
    2**64."""
    key = np.array([key & _WORD for key in keys], dtype=np.uint64)
    draw = np.array([draw & _WORD for draw in draws], dtype=np.uint64)
    with np.errstate(over="ignore"):  # wrap-around is intended
        state = _mix(key + _GOLDEN) + (draw + np.uint64(1)) * _GOLDEN
        bits = _mix(state) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = (word ^ (word >> _SHIFTS[0])) * _FACTORS[0]
    word = (word ^ (word >> _SHIFTS[1])) * _FACTORS[1]
    return word ^ (word >> _SHIFTS[2])
