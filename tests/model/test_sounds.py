"""Tests that prompts with audio give the logits of transformers' eager pass over spectrograms.

Prompts are computed whole, in chunks that split a sound, packed with other requests, decoded, and from the prefix
cache. A sound never finds the cached blocks of another sound."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import VoxtralForConditionalGeneration, WhisperFeatureExtractor

from bridle.model.check import check_model
from bridle.multimodal import MediaReader, Picture, open_reader
from bridle.tokenizer import Tokenizer
from tests.fakes import audio_checkpoints
from tests.model.driver import load
from tests.model.image_prompts import LIMIT, Prompt, check_engine_draws, error, make_ready, run_packed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio_checkpoints.make_hearing(tmp_path_factory.mktemp("voxtral"))


@pytest.fixture(scope="module")
def reader(folder: Path) -> MediaReader:
    found = open_reader(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return VoxtralForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def prompt(reader: MediaReader, tokenizer: Tokenizer) -> Any:
    def make(*parts: str | Picture) -> Prompt:
        text = "".join(part if isinstance(part, str) else audio_checkpoints.NAMES[0] for part in parts)
        sounds = [part for part in parts if isinstance(part, Picture)]
        placed, sights = reader.place(tokenizer.encode(text, add_special_tokens=False), sounds, tokenizer)
        return Prompt(placed, sights.runs, sights.media, sounds)

    return make


def noise(seed: int, num_pieces: float = 2.5) -> np.ndarray[Any, Any]:
    length = int(num_pieces * audio_checkpoints.PIECE)
    return (np.random.RandomState(seed).randn(length) * np.linspace(0, 0.3, length)).astype(np.float32)


@pytest.fixture
def sound(reader: MediaReader) -> Any:
    return lambda seed, num_pieces=2.5: reader.read(noise(seed, num_pieces), modality="audio")


def spectra_of(sound: Picture) -> Tensor:
    (array,) = sound.medium.arrays
    return torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())


def logits(whole: Any, prompt: Prompt, more: tuple[int, ...] = ()) -> Tensor:
    """Return the logits [L, V] of transformers' eager pass."""
    spectra = torch.cat([spectra_of(each) for each in prompt.pictures]) if prompt.pictures else None
    with torch.inference_mode():
        found = whole(input_ids=torch.tensor([[*prompt.tokens, *more]]), input_features=spectra, use_cache=False)
    return found.logits[0]  # type: ignore[no-any-return]


@pytest.fixture
def executor(folder: Path) -> Iterator[Any]:
    loaded = load(folder)
    yield loaded
    loaded.close()


def test_text_equals_the_library(folder: Path) -> None:
    assert check_model(folder, max_tokens=48).is_equal


@pytest.mark.parametrize("num_pieces", [0.01, 1.0, 2.5])
def test_spectra_are_those_of_the_library(num_pieces: float, folder: Path, sound: Any) -> None:
    library = WhisperFeatureExtractor.from_pretrained(folder)
    options = {
        "padding": True,
        "truncation": False,
        "pad_to_multiple_of": audio_checkpoints.PIECE,
        "sampling_rate": 16_000,
    }
    wanted = library(noise(1, num_pieces), return_tensors="pt", **options)["input_features"]
    pieces = wanted.reshape(16, -1, 16).transpose(0, 1)
    assert torch.allclose(spectra_of(sound(1, num_pieces)), pieces, atol=2e-4)


def test_logits_are_those_of_the_library(whole: Any, prompt: Any, sound: Any, executor: Any) -> None:
    one, two = sound(1), sound(2)
    prompts = [prompt("hear ", one, " here ", two, " and say"), prompt("only text"), prompt(sound(3, 0.5), "x")]
    marked = prompt(f"{audio_checkpoints.NAMES[1]}", sound(3, 0.5), "x")
    assert marked.tokens == prompts[2].tokens  # a template may write the token that begins a sound
    assert [run.length for run in prompts[0].runs] == [3 * audio_checkpoints.ROWS] * 2
    make_ready(executor, [medium for each in prompts for medium in each.media])
    for chunks in ((300,), (5, 1, 9, 2)):
        for found, each in zip(run_packed(executor, prompts, chunks), prompts, strict=True):
            assert error(found, logits(whole, each)) < LIMIT
    swapped = prompt("hear ", two, " here ", one, " and say")
    assert error(run_packed(executor, [swapped], (300,))[0], logits(whole, prompts[0])) > 1000 * LIMIT


@pytest.mark.parametrize("budget", [64, 9])
def test_engines_draw_what_the_library_would(budget: int, folder: Path, whole: Any, prompt: Any, sound: Any) -> None:
    """Prompts run together and alone, again from the prefix cache, and with a different sound of as many tokens."""
    first = prompt("hear ", sound(1), " say")
    answer = logits(whole, first)[-1].argmax()
    others = (prompt("hear ", sound(seed), " say") for seed in range(5, 200))
    other = next(each for each in others if logits(whole, each)[-1].argmax() != answer)
    assert other.tokens == first.tokens
    prompts = {"first": first, "other": other, "text": prompt("no sound at all, but a text")}
    end = audio_checkpoints.AUDIO
    executor = load(folder, num_blocks=128)
    check_engine_draws(executor, prompts, partial(logits, whole), range(end, end + 1), budget)
