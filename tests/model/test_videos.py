"""Tests that prompts with videos give the logits of transformers' eager pass over frames.

Prompts are computed whole, in chunks that split videos, and packed with images and text. RoPE positions are those with
which the models were trained."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from bridle.model.batch_inputs import grid_positions
from bridle.multimodal import Picture, open_reader
from bridle.multimodal.video_processor import WATCHING
from bridle.tokenizer import Tokenizer
from tests.covering import slow_but
from tests.fakes import vision_checkpoints
from tests.model.driver import load, skip_older
from tests.model.image_prompts import (
    LIMIT,
    Eyes,
    Prompt,
    check_engine_draws,
    error,
    make_ready,
    run_packed,
)

VIDEO = vision_checkpoints.IMAGE - 3
PLACES = {
    "qwen": {"image": "<|image_pad|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"},
    "llava_onevision": {"image": "<image>", "video": "<video>"},
    "glm4v": {"image": "<|image|>", "video": "<|begin_of_video|><|video|><|end_of_video|>"},
    "internvl": {"image": "<IMG_CONTEXT>", "video": "<video>"},
    "smolvlm": {"image": "<image>", "video": "<global-img>"},
}
#: Families whose positions have three coordinates.
GRIDDED = tuple(family for family in WATCHING if family.startswith(("glm4v", "qwen")))
#: Frames a second of a video, where not all of its frames would be seen at 8.
RATES = {"glm4v": 2.0, "smolvlm": 2.0}


def frames(seed: int, count: int = 6, height: int = 24, width: int = 30) -> list[np.ndarray[Any, Any]]:
    return list(np.random.RandomState(seed).randint(0, 255, (count, height, width, 3), dtype=np.uint8))


class Watcher(Eyes):
    """A tiny model with transformers' and bridle's readers of videos, which also reads images as `Eyes` does."""

    def prompt(self, *parts: str | Picture) -> Prompt:
        places = PLACES.get(self.family, PLACES["qwen"])
        text = "".join(part if isinstance(part, str) else places[part.modality] for part in parts)
        pictures = [part for part in parts if isinstance(part, Picture)]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        placed, sights = self.reader.place(tokens, pictures, self.tokenizer)
        return Prompt(placed, sights.runs, sights.media, pictures)

    def video(self, seed: int, count: int = 6, rate: float | None = 0.0, **size: int) -> Picture:
        shown = frames(seed, count, **size)
        return self.reader.read(
            shown if rate is None else (shown, rate or RATES.get(self.family, 8.0)), modality="video"
        )

    def logits(self, prompt: Prompt, more: Any = (), positions: Tensor | None = None) -> Tensor:
        """Return the logits [L, V] of transformers' eager pass, at its own positions or at `positions`."""
        ids = torch.tensor([[*prompt.tokens, *more]])
        inputs = self._pixels(prompt)
        if self.family == "qwen2_5_vl":
            paces = {run.key: run.pace for run in prompt.runs if run.key in _videos(prompt)}
            speed = self.whole.config.vision_config.tokens_per_second
            inputs["second_per_grid_ts"] = torch.tensor([paces[key] / speed for key in _videos(prompt)])
        if self.family in GRIDDED:
            inputs["mm_token_type_ids"] = types_of(self.family, ids)
        if positions is not None:
            inputs["position_ids"] = positions
        self.whole.model.rope_deltas = None
        with torch.inference_mode():
            return self.whole(input_ids=ids, **inputs, use_cache=False).logits[0]  # type: ignore[no-any-return]

    def _pixels(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return the frames' pixels as transformers' processors pass them if frames are images, in order and without
        padding."""
        found = [picture.medium.arrays[0] for picture in prompt.pictures]
        if {array.name for array in found} != {"pixel_values"}:
            return super()._pixels(prompt)
        numbers = [np.frombuffer(array.data, array.dtype).reshape(array.shape).copy() for array in found]
        return {"pixel_values": torch.cat([torch.from_numpy(each) for each in numbers], numbers[0].ndim - 4)}


def types_of(family: str, ids: Tensor) -> Tensor:
    """Return 1 for tokens of images and 2 for tokens of videos. GLM-4V uses one token for both, after different start
    marks."""
    rows = (ids == vision_checkpoints.IMAGE).int()
    if family != "glm4v":
        return rows + 2 * (ids == VIDEO).int()
    begun, ended = ((ids == VIDEO - number).int().cumsum(-1) for number in (1, 2))
    return rows * (1 + (begun > ended).int())


def _videos(prompt: Prompt) -> list[bytes]:
    return [picture.medium.key for picture in prompt.pictures if picture.modality == "video"]


@pytest.fixture(scope="module")
def watchers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str) -> Watcher:
        skip_older(f"videos of {family}")
        folder = vision_checkpoints.make_seeing(family, tmp_path_factory.mktemp(family))
        whole = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        reader = open_reader(folder)
        assert reader is not None
        return Watcher(family, folder, whole, reader, Tokenizer.load(folder))

    return make


@pytest.fixture
def executor(watchers: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    loaded = load(watchers(request.getfixturevalue("family")).folder, num_blocks=256)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("family", slow_but({"glm4v", "internvl", "qwen2_5_vl", "qwen3_vl"}, WATCHING))
def test_logits_are_those_of_the_library(family: str, watchers: Any, executor: Any) -> None:
    mine: Watcher = watchers(family)
    one, two = mine.video(1), mine.video(2)
    between = () if family == "glm4v" else (mine.picture(4),)  # the library's model takes one kind at a time
    prompts = [
        mine.prompt("watch ", one, " here ", *between, " and ", two, " say"),
        mine.prompt("only text here"),
        mine.prompt(mine.video(3, 1, height=9, width=40), "x"),
    ]
    make_ready(executor, [medium for prompt in prompts for medium in prompt.media])
    wanted = [mine.logits(prompt) for prompt in prompts]
    for chunks in ((300,), (5, 1, 9, 2)):
        for found, want in zip(run_packed(executor, prompts, chunks), wanted, strict=True):
            assert error(found, want) < LIMIT
    swapped = mine.prompt("watch ", two, " here ", *between, " and ", one, " say")
    assert swapped.tokens == prompts[0].tokens
    assert error(run_packed(executor, [swapped], (300,))[0], wanted[0]) > 1000 * LIMIT


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_text_stands_behind_all_times_of_a_long_video(family: str, watchers: Any, executor: Any) -> None:
    """Text after a video continues after the largest position before it, as in these models' training. transformers
    counts only height and width, so its positions of text would overlap with the video's times."""
    mine: Watcher = watchers(family)
    prompt = mine.prompt("see ", mine.video(5, 16, None, height=12, width=12), " say")
    (run,) = prompt.runs
    assert run.grid is not None and run.pace == {"qwen2_vl": 1.0, "qwen2_5_vl": 4.0}[family]
    times = np.floor(np.arange(run.grid[0]) * run.pace).astype(np.int64)
    cells = np.stack([part.reshape(-1) for part in np.meshgrid(times, *map(np.arange, run.grid[1:]), indexing="ij")])
    seen = cells + run.position
    text = np.arange(len(prompt.tokens) - run.end) + seen.max() + 1
    wanted = np.concatenate([np.tile(np.arange(run.position), (3, 1)), seen, np.tile(text, (3, 1))], 1)
    num = len(prompt.tokens)
    for start, end in ((0, num), (3, 20), (run.position + 5, num), (num - 1, num)):
        assert (grid_positions(prompt.runs, start, end) == wanted[:, start:end]).all()
    make_ready(executor, prompt.media)
    positions = torch.from_numpy(wanted)[:, None]
    assert error(run_packed(executor, [prompt], (7,))[0], mine.logits(prompt, (), positions)) < LIMIT


@pytest.mark.parametrize("family", GRIDDED)
def test_positions_are_those_of_the_library(family: str, watchers: Any) -> None:
    mine: Watcher = watchers(family)
    prompt = mine.prompt("ab", mine.video(1), "c", mine.picture(2, 50, 9), "d", mine.video(3, 4, 6.0), "e")
    ids = torch.tensor([prompt.tokens])
    pixels = mine._pixels(prompt)
    given: dict[str, Any] = {name: pixels[name] for name in ("image_grid_thw", "video_grid_thw")}
    if family == "qwen2_5_vl":
        speed = mine.whole.config.vision_config.tokens_per_second
        paces = {run.key: run.pace for run in prompt.runs}
        given["second_per_grid_ts"] = torch.tensor([paces[key] / speed for key in _videos(prompt)])
    wanted, _ = mine.whole.model.get_rope_index(ids, types_of(family, ids), **given)
    num = len(prompt.tokens)
    for start in range(0, num, 3):
        for end in (start + 1, min(start + 7, num), num):
            assert (grid_positions(prompt.runs, start, end) == wanted[:, 0, start:end].numpy()).all()


_DRAWING = ["glm4v", "internvl", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"]


@pytest.mark.few(2)
@pytest.mark.parametrize("family", _DRAWING)
def test_engines_draw_what_the_library_would(family: str, watchers: Any) -> None:
    """Prompts run again from the prefix cache, and with a different video of as many tokens."""
    mine: Watcher = watchers(family)
    first = mine.prompt("see ", mine.video(1), " say")
    answer = mine.logits(first)[-1, :VIDEO].argmax()
    others = (mine.prompt("see ", mine.video(seed), " say") for seed in range(5, 200))
    other = next(each for each in others if mine.logits(each)[-1, :VIDEO].argmax() != answer)
    assert other.tokens == first.tokens
    executor = load(mine.folder, sampler=None, num_blocks=192)
    banned = range(VIDEO, vision_checkpoints.IMAGE + 1)
    check_engine_draws(executor, {"first": first, "other": other}, mine.logits, banned)
