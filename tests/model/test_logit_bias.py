"""Tests of logit biases for many tokens: they are packed, validated and added in the same way as single biases."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest
from bridle.model.sampling.rows import BiasTable
from bridle.sampling import SamplingParams
from bridle.sampling_values import LogitBias

VOCAB = 1_000


def many(**odd: Any) -> dict[Any, Any]:
    return {**dict.fromkeys(range(0, VOCAB, 2), -100.0), **{int(key[1:]): value for key, value in odd.items()}}


def rows(*biases: dict[int, float]) -> list[Any]:
    return [SimpleNamespace(sampling=SamplingParams(logit_bias=bias), bias=()) for bias in biases]


def test_many_are_packed_and_still_a_mapping() -> None:
    bias = many(t7=-math.inf)
    packed = SamplingParams(logit_bias=bias).logit_bias
    assert isinstance(packed, LogitBias)
    assert packed == bias
    assert (packed[7], len(packed), 1 in packed) == (-math.inf, len(bias), False)
    assert SamplingParams(logit_bias=packed).logit_bias is packed
    assert type(SamplingParams(logit_bias={1: 2.0}).logit_bias) is dict


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (many(t1=math.nan), r"logit_bias\[1\] is nan"),
        (many(t1=math.inf), r"logit_bias\[1\] is infinite"),
        (many(t1="5"), r"logit_bias\[1\] is '5'"),
        ({**many(), -1: 1.0}, "logit_bias is -1"),
        ({**many(), 1 << 70: 1.0}, f"logit_bias is {1 << 70}"),
        ({**many(), 2.5: 1.0}, r"logit_bias is 2[.]5"),
    ],
)
def test_many_are_checked_one_by_one(bias: dict[Any, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        SamplingParams(logit_bias=bias)


@given(st.lists(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32)), min_size=1, max_size=4))
def test_packed_or_not_the_sum_is_the_same(biases: list[dict[int, float]]) -> None:
    biases = [*biases, {**many(), **biases[0]}]
    work = torch.zeros(len(biases), VOCAB + 24)
    BiasTable().apply(work, rows(*biases), VOCAB)
    expected = torch.zeros_like(work)
    for row, bias in zip(expected, biases, strict=True):
        for token, value in bias.items():
            row[token] = value
    assert torch.equal(work, expected)


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    work = torch.zeros(1, VOCAB)
    BiasTable().apply(work, rows({**many(), VOCAB + 5: 3.0}), VOCAB - 1)
    assert work[0, VOCAB - 1] == 0
    assert work[0, 0] == -100
