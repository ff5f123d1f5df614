"""The watermark: green tokens gain, the list depends on the previous token alone, and a detector finds it."""

from __future__ import annotations

import json

import pytest
import torch

from bridle.errors import InvalidRequest
from bridle.sampling import SamplingParams
from bridle.sampling_values import Watermark
from tests.model.sampling_kit import random_logits, row, run


def _green(previous: int, vocab: int, gamma: float = 0.5) -> set[int]:
    """As a detector of the original computes it."""
    generator = torch.Generator().manual_seed(15485863 * previous)
    return set(torch.randperm(vocab, generator=generator)[: int(vocab * gamma)].tolist())


def test_green_tokens_win_over_slightly_better_red_ones() -> None:
    green = _green(5, 300)
    red = next(token for token in range(300) if token not in green)
    logits = torch.zeros(1, 300)
    logits[0, red] = 1.0
    history = {0: ([9, 5], 1)}
    assert run(logits, [row(temperature=0.0)], histories=history).tokens == [red]
    marked = run(logits, [row(temperature=0.0, watermark=True)], histories=history).tokens[0]
    assert marked in green


def test_a_bonus_too_small_changes_nothing_and_neighbours_are_untouched() -> None:
    logits = random_logits(2, 300)
    histories = {0: ([1], 1), 1: ([2], 1)}
    plain = run(logits, [row(0, temperature=0.0), row(1, temperature=0.0)], histories=histories)
    marks = [row(0, temperature=0.0, watermark=Watermark(delta=1e-9)), row(1, temperature=0.0)]
    assert run(logits, marks, histories=histories).tokens == plain.tokens
    marks[0] = row(0, temperature=0.0, watermark=Watermark(delta=50.0))
    marked = run(logits, marks, histories=histories)
    assert marked.tokens[1] == plain.tokens[1] and marked.tokens[0] in _green(1, 300)


def test_a_detector_finds_far_more_green_tokens_than_chance() -> None:
    tokens, found = [3], 0
    for step in range(200):
        logits = random_logits(1, 257, seed=step, scale=1.0)
        one = row(watermark=Watermark(delta=2.0), key=7, draw=step)
        token = run(logits, [one], histories={0: (tokens, 1)}).tokens[0]
        found += token in _green(tokens[-1], 257)
        tokens.append(token)
    assert found > 150  # of 200, where chance gives 100


def test_without_a_previous_token_there_is_no_list() -> None:
    logits = random_logits(1, 100)
    assert run(logits, [row(temperature=0.0, watermark=True)]).tokens == [int(logits.argmax())]


def test_it_is_plain_data_and_checked() -> None:
    sampling = SamplingParams(watermark=Watermark(gamma=0.25))
    assert SamplingParams(**json.loads(json.dumps(sampling.to_dict()))) == sampling
    assert SamplingParams(watermark=False).watermark is None
    for bad in ("yes", {"gama": 0.5}):
        with pytest.raises(InvalidRequest, match="watermark is"):
            SamplingParams(watermark=bad)  # type: ignore[arg-type]
    for wrong in ({"gamma": 0.0}, {"gamma": 1.5}, {"delta": float("nan")}):
        with pytest.raises(InvalidRequest, match="must be"):
            SamplingParams(watermark=wrong)  # type: ignore[arg-type]
