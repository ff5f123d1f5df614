"""Tests of the watermark: green tokens gain, the green list depends only on the previous token, and a detector finds
it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bridle.engine.control.decision import Branch, mask_of
from bridle.engine.sampling.sample_rows import draw_row
from bridle.errors import InvalidRequest
from bridle.model.sampling.watermark import keyed_green_list
from bridle.sampling import SamplingParams
from bridle.sampling_values import Watermark
from bridle.watermark import detect, is_green, read_key, seed_of
from tests.engine.support import make_sequence
from tests.model.sampling_kit import random_logits, row, run


def _green(previous: int, vocab: int, gamma: float = 0.5) -> set[int]:
    """Return the green tokens as the original detector computes them."""
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


# -- with an operator's key ----------------------------------------------------------------------------------

KEY = "ab" * 32


@pytest.mark.parametrize(("context", "gamma"), [(1, 0.25), (3, 0.5)])
def test_the_samplers_list_is_that_of_the_detector(context: int, gamma: float) -> None:
    last = [5, 9, 100_000][-context:]
    listed = keyed_green_list(KEY, last, 5_000, gamma, torch.device("cpu"))
    seed = seed_of(KEY, last)
    assert listed.tolist() == [is_green(seed, token, gamma) for token in range(5_000)]
    assert abs(float(listed.float().mean()) - gamma) < 0.03
    assert listed.tolist() != keyed_green_list("cd" * 32, last, 5_000, gamma, torch.device("cpu")).tolist()


def keyed_text(num_tokens: int, mark: Watermark | None, temperature: float = 1.0) -> list[int]:
    tokens = [3, 4]
    for step in range(num_tokens):
        one = row(watermark=mark, key=7, draw=step, temperature=temperature)
        tokens += run(random_logits(1, 257, seed=step, scale=1.0), [one], histories={0: (tokens, 1)}).tokens
    return tokens


def test_a_keyed_text_is_detected_with_its_key_alone() -> None:
    mark = Watermark(0.25, 2.0, KEY, 2)
    for temperature in (1.0, 0.0):
        tokens = keyed_text(150, mark, temperature)
        found = detect(tokens, KEY, 0.25, 2)
        assert found.num_scored > 100 and found.z > 6.0 and found.p_value < 1e-8
        for other in (detect(tokens, "cd" * 32, 0.25, 2), detect(keyed_text(150, None), KEY, 0.25, 2)):
            assert abs(other.z) < 4.0 and other.p_value > 1e-4


def test_masks_win() -> None:
    logits = random_logits(1, 257)
    seed = seed_of(KEY, [4])
    red = [token for token in range(257) if not is_green(seed, token, 0.25)][:3]
    one = row(watermark=Watermark(0.25, 50.0, KEY), mask=mask_of(red, 257))
    assert run(logits, [one], histories={0: ([3, 4], 1)}).tokens[0] in red


def test_repetitions_are_scored_once_and_the_tail_is_exact() -> None:
    assert detect([1, 2] * 50, KEY, 0.25).num_scored == 2
    found = detect(list(range(11)), KEY, 0.5)
    ways = sum(math.comb(10, k) for k in range(found.num_green, 11))
    assert found.num_scored == 10 and found.p_value == pytest.approx(ways / 1024)


def test_a_key_is_told_to_nobody_and_taken_from_no_request() -> None:
    sampling = SamplingParams(watermark=Watermark(key=KEY))
    assert "watermark" not in sampling.to_dict() and KEY not in repr(sampling)
    with pytest.raises(InvalidRequest, match="watermark is"):
        SamplingParams(watermark={"gamma": 0.5, "key": KEY})  # type: ignore[arg-type]


def test_a_controllers_sampling_keeps_it() -> None:
    mark = Watermark(key=KEY)
    seq = make_sequence(0, [1, 2], watermark=mark)
    made = draw_row(seq, Branch(sampling=SamplingParams(temperature=0.5)), 0, 0)
    assert made.sampling.watermark == mark and made.sampling.temperature == 0.5


def test_a_key_file_is_checked(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("secret")
    for path, told in ((short, "has 6 bytes; a key has 16 to 4096"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(InvalidRequest, match=told):
            read_key(path)
