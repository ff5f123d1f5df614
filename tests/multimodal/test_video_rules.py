"""Tests of the selection, size and order of video frames, compared with transformers' rules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bridle.multimodal import open_reader
from bridle.multimodal.video_processor import WATCHING, Frames, SelectedFrames, patches_of
from bridle.tokenizer import Tokenizer
from tests.fakes import vision_checkpoints
from tests.multimodal.clips import clip, library

FAMILIES = ("qwen2_vl", "qwen3_vl")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("count", "rate"), [(2, 30.0), (7, 30.0), (300, 30.0), (301, 29.97), (5_000, 25.0), (9, 1.0)])
def test_frames_are_chosen_as_by_the_library(family: str, count: int, rate: float) -> None:
    base = WATCHING[family].base
    itself = SimpleNamespace(temporal_patch_size=2, min_frames=4, max_frames=768, num_frames=None, fps=2)
    metadata = SimpleNamespace(total_num_frames=count, fps=rate)
    wanted = [int(index) for index in library(family, "sample_frames")(itself, metadata, fps=2)]
    assert list(WATCHING[family].sample(clip(count, rate), base, 768)) == wanted
    assert len(WATCHING[family].sample(clip(count, rate), base, 8)) <= 8


@pytest.mark.few(10)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "height"), [(64, 48), (1920, 1080), (20, 300), (3, 3), (720, 1280)])
@pytest.mark.parametrize("num", [2, 8, 240])
def test_frames_have_the_librarys_size(family: str, width: int, height: int, num: int) -> None:
    frames, budget = Frames(patch=14, least=4 * 784, most=200 * 784 * (num if family == "qwen3_vl" else 1)), 10**12
    found = WATCHING[family].size({}, clip(num, 2.0, width, height), num, frames, budget)
    if family == "qwen2_vl":
        wanted = library(family, "smart_resize")(height, width, 28, frames.least, frames.most)
    else:
        wanted = library(family, "smart_resize")(num, height, width, 2, 28, frames.least, frames.most)
    assert found == wanted
    tall, wide = WATCHING[family].size({}, clip(num, 2.0, width, height), num, frames, 7_840 * num)
    assert tall * wide <= 2 * 7_840  # more only where a side has the least length


@pytest.mark.parametrize("num", [1, 2, 5, 6])
def test_patches_lie_as_the_librarys(num: int) -> None:
    frames = Frames(patch=4)
    shown = list(np.random.RandomState(num).randint(0, 255, (num, 16, 24, 3), dtype=np.uint8))
    found, grid = patches_of(shown, frames)
    mean, deviation = torch.tensor(frames.mean)[:, None, None], torch.tensor(frames.deviation)[:, None, None]
    pixels = (torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2).float() / 255 - mean) / deviation
    for family in FAMILIES:
        patches, *sizes = library(family, "patchify")(None, pixels[None], 4, 2, 2)
        assert tuple(sizes) == grid
        assert torch.allclose(torch.from_numpy(found), patches[0], atol=1e-6)


def test_two_equal_frames_are_a_picture(tmp_path: Path) -> None:
    reader = open_reader(vision_checkpoints.make_seeing("qwen2_vl", tmp_path))
    assert reader is not None
    frame = np.random.RandomState(1).randint(0, 255, (24, 32, 3), dtype=np.uint8)
    still = reader.read(Image.fromarray(frame))
    film = reader.read([frame, frame], modality="video")
    (mine, _), (other, _) = film.medium.arrays, still.medium.arrays
    numbers = [np.frombuffer(array.data, np.float32).reshape(array.shape) for array in (mine, other)]
    assert np.allclose(*numbers, atol=1e-6)
    assert film.layout.grid == still.layout.grid and film.medium.num_rows == still.medium.num_rows


def test_times_are_said_as_by_the_library(tmp_path: Path) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    for indices, rate in (((0, 15, 30, 44), 30.0), ((0, 1, 2), 2.0), ((7,), 1.0)):
        wanted = Qwen3VLProcessor._calculate_timestamps(None, list(indices), rate, 2)
        assert SelectedFrames(indices, 99, rate, 2, (len(wanted), 1, 1)).times == wanted
    folder = vision_checkpoints.make_seeing("qwen3_vl", tmp_path)
    reader, tokenizer = open_reader(folder), Tokenizer.load(folder)
    assert reader is not None
    shown = np.random.RandomState(1).randint(0, 255, (6, 24, 32, 3), dtype=np.uint8)
    video = reader.read((shown, 3.0), modality="video")
    tokens = ("image_token", "vision_start_token", "vision_end_token", "video_token")
    names = dict(zip(tokens, vision_checkpoints.names_of("qwen3_vl"), strict=True))
    processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    itself: Any = SimpleNamespace(**names, video_processor=processor)
    itself._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(itself, *given)
    grid = np.frombuffer(video.medium.arrays[1].data, np.int64).reshape(1, 3)
    chosen = WATCHING["qwen3_vl"].sample(clip(6, 3.0), WATCHING["qwen3_vl"].base, 240)
    metadata = SimpleNamespace(fps=3.0, frames_indices=list(chosen))
    wanted_text = Qwen3VLProcessor.replace_video_token(
        itself, {"video_grid_thw": grid, "video_metadata": [metadata]}, 0
    )
    around = "<|vision_start|><|video_pad|><|vision_end|>"
    placed, _ = reader.place(tokenizer.encode(f"a{around}b", add_special_tokens=False), [video], tokenizer)
    assert list(placed) == tokenizer.encode(f"a{wanted_text}b", add_special_tokens=False)
    bare, _ = reader.place(tokenizer.encode("a<|video_pad|>b", add_special_tokens=False), [video], tokenizer)
    assert bare == placed
