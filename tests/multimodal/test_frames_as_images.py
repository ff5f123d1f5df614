"""Tests of video frames that a model reads like images: frames, sizes and texts equal those of transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata

from bridle.errors import InvalidRequest
from bridle.multimodal import MediaLimits, MediaReader, open_reader
from bridle.multimodal.frames_as_images import AS_PICTURES, in_words
from bridle.multimodal.video_frames import Frames
from bridle.multimodal.video_processor import WATCHING
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_template import Look, prepare
from tests.fakes import vision_checkpoints
from tests.multimodal.clips import clip, library

CLIPS = ((2, 30.0), (7, 30.0), (300, 30.0), (301, 29.97), (2_497, 23.976), (9, 1.0), (50_000, 25.0))


def opened(family: str, folder: Path) -> tuple[MediaReader, Tokenizer]:
    reader = open_reader(vision_checkpoints.make_seeing(family, folder))
    assert reader is not None
    return reader, Tokenizer.load(folder)


def sampled(family: str, settings: dict[str, Any], count: int, rate: float) -> list[int]:
    metadata = VideoMetadata(total_num_frames=count, fps=rate, duration=count / rate)
    return [int(index) for index in library(family, "sample_frames")(SimpleNamespace(**settings), metadata)]


@pytest.mark.few(3)
@pytest.mark.parametrize(("count", "rate"), CLIPS)
def test_frames_are_chosen_as_by_the_library(count: int, rate: float) -> None:
    smol = Frames.of({"fps": 1, "max_frames": 64}, AS_PICTURES["smolvlm"].base)
    wanted = sampled("smolvlm", {"fps": 1, "num_frames": 64}, count, rate)
    assert AS_PICTURES["smolvlm"].sample(clip(count, rate), smol, 240) == wanted
    assert len(AS_PICTURES["smolvlm"].sample(clip(count, rate), smol, 5)) <= 5
    for num in range(1, min(count, 66)):
        frames = Frames.of({"max_frames": num}, AS_PICTURES["internvl"].base)
        settings = {"num_frames": num, "initial_shift": True}
        assert AS_PICTURES["internvl"].sample(clip(count, rate), frames, 240) == sampled(
            "internvl", settings, count, rate
        )
    unsaid = AS_PICTURES["internvl"].sample(clip(count, rate), AS_PICTURES["internvl"].base, 240)
    assert len(unsaid) == min(count, 8)


@pytest.mark.parametrize(("width", "height"), [(64, 48), (1920, 1080), (20, 300), (3, 3), (721, 1280), (16_000, 80)])
@pytest.mark.parametrize("longest", [384, 1456, 9_000])
def test_frames_have_the_librarys_size_on_the_way_to_a_square(width: int, height: int, longest: int) -> None:
    resized = library("smolvlm", "get_resize_output_image_size", MAX_IMAGE_SIZE=4096)
    via = AS_PICTURES["smolvlm"].via
    assert via is not None
    assert via(clip(1, 1.0, width, height), Frames(most=longest)) == resized(torch.empty(1, 0, height, width), longest)


def test_original_checkpoints_say_how_videos_are_sampled_in_a_part_of_its_own() -> None:
    said = {
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
        "video_sampling": {"fps": 3, "max_frames": 50, "video_size": {"longest_edge": 600}},
    }
    family = AS_PICTURES["smolvlm"]
    frames = Frames.of(family.settings(said), family.base)
    assert (frames.rate, frames.many, frames.most, frames.edge) == (3.0, 50, 600, 512)
    del said["video_sampling"]
    frames = Frames.of(family.settings({**said, "fps": 2, "num_frames": 9}), family.base)
    assert (frames.rate, frames.many, frames.most, frames.edge) == (2.0, 9, 2048, 512)


def test_numbers_are_said_in_words() -> None:
    words = {
        1: "one",
        8: "eight",
        12: "twelve",
        19: "nineteen",
        20: "twenty",
        21: "twenty-one",
        64: "sixty-four",
        100: "one hundred",
        101: "one hundred and one",
        240: "two hundred and forty",
    }
    assert {number: in_words(number) for number in words} == words


@pytest.mark.parametrize("place", ["User: {}say", "a\n{}", "{}\nb", "{}", "a {} b", "{}{}"])
def test_smolvlm_introduces_a_video_and_says_the_time_of_frames(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, tokenizer = opened("smolvlm", tmp_path)
    shown = np.random.RandomState(1).randint(0, 255, (150, 24, 32, 3), dtype=np.uint8)
    video = reader.read((shown, 2.0), modality="video")
    indices = AS_PICTURES["smolvlm"].sample(clip(150, 2.0), AS_PICTURES["smolvlm"].base, 240)
    metadata = VideoMetadata(total_num_frames=150, fps=2.0, duration=75.0, frames_indices=indices)
    itself: Any = SimpleNamespace(
        image_seq_len=4,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    monkeypatch.setattr(processing_smolvlm, "num2words", in_words)
    given = {"pixel_values": np.empty((1, len(indices))), "video_metadata": [metadata]}
    text = processing_smolvlm.SmolVLMProcessor.replace_video_token(itself, given, 0)
    assert "series of sixty-four frames from a 0:01:15 [" in text and "\nFrame from 01:14:" in text
    videos = [video] * place.count("{}")
    prompt = tokenizer.encode(place.replace("{}", "<global-img>"), add_special_tokens=False)
    placed, _ = reader.place(prompt, videos, tokenizer)
    assert list(placed) == tokenizer.encode(place.replace("{}", text), add_special_tokens=False)


@pytest.mark.parametrize("place", ["user\n{}\nsay", "a {} b", "{}{}"])
def test_internvl_numbers_frames(place: str, tmp_path: Path) -> None:
    reader, tokenizer = opened("internvl", tmp_path)
    shown = np.random.RandomState(1).randint(0, 255, (3, 24, 32, 3), dtype=np.uint8)
    video = reader.read(shown, modality="video")
    itself: Any = SimpleNamespace(
        image_seq_length=4,
        start_image_token="<img>",
        image_token="<IMG_CONTEXT>",
        end_image_token="</img>",
    )
    text = InternVLProcessor.replace_video_token(itself, {"pixel_values_videos": [shown]}, 0)
    prompt = tokenizer.encode(place.replace("{}", "<video>"), add_special_tokens=False)
    placed, _ = reader.place(prompt, [video] * place.count("{}"), tokenizer)
    assert list(placed) == tokenizer.encode(place.replace("{}", text), add_special_tokens=False)


@pytest.mark.parametrize(("count", "rate"), [*CLIPS, (9_000, 30.0), (9_001, 30.0)])
def test_glm_sees_frames_by_seconds(count: int, rate: float) -> None:
    """A last frame that transformers repeats is used once, but counts for the image size."""
    family = WATCHING["glm4v"]
    wanted = sampled("glm4v", {"fps": 2, "max_duration": 300}, count, rate)
    assert list(family.sample(clip(count, rate), family.base, 768)) == list(dict.fromkeys(wanted))
    assert len(family.sample(clip(count, rate), family.base, 8)) <= 8
    num = len(family.sample(clip(count, rate), family.base, 768))
    size = library("glm4v", "smart_resize")(len(wanted), 720, 1280, 2, 28, 112 * 112, 28 * 28 * 2 * 30_000)
    assert family.size({}, clip(count, rate, 1280, 720), num, family.base, 10**12) == size


def test_glm_says_seconds_behind_frames(tmp_path: Path) -> None:
    reader, tokenizer = opened("glm4v", tmp_path)
    video = reader.read((np.zeros((21, 24, 32, 3), np.uint8), 3.0), modality="video")
    indices = list(WATCHING["glm4v"].sample(clip(21, 3.0), WATCHING["glm4v"].base, 240))
    itself: Any = SimpleNamespace(image_token="<|image|>", video_processor=SimpleNamespace(merge_size=2))
    itself.replace_frame_token_id = partial(Glm4vProcessor.replace_frame_token_id, itself)
    metadata = VideoMetadata(total_num_frames=21, fps=3.0, frames_indices=indices)
    grid = np.frombuffer(video.medium.arrays[1].data, np.int64).reshape(1, 3)
    text = Glm4vProcessor.replace_video_token(itself, {"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    assert text.endswith("<|end_of_image|>6") and grid[0, 0] == 7
    around = "<|begin_of_video|>{}<|end_of_video|>"
    placed, _ = reader.place(tokenizer.encode(around.format("<|video|>"), add_special_tokens=False), [video], tokenizer)
    assert list(placed) == tokenizer.encode(around.format(text), add_special_tokens=False)


@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
def test_a_still_frame_is_a_picture(family: str, tmp_path: Path) -> None:
    """A video of one frame, as large as a tile, gives the same pixels as an image of this frame."""
    folder = vision_checkpoints.make_seeing(family, tmp_path)
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    small = {"size": {"longest_edge": 16}} if family == "smolvlm" else {"max_patches": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, **small}), encoding="utf-8")
    reader = open_reader(folder)
    assert reader is not None
    frame = np.random.RandomState(1).randint(0, 255, (16, 16, 3), dtype=np.uint8)
    film, still = reader.read([frame], modality="video"), reader.read(Image.fromarray(frame))
    (mine,), other = film.medium.arrays, still.medium.arrays[0]
    first = np.frombuffer(other.data, np.float32).reshape(-1, 3, 16, 16)[-1]
    assert np.allclose(np.frombuffer(mine.data, np.float32).reshape(3, 16, 16), first, atol=1e-6)


@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
def test_fewer_frames_are_seen_where_a_context_is_short(family: str, tmp_path: Path) -> None:
    reader, _ = opened(family, tmp_path)
    shown = np.zeros((90, 16, 16, 3), np.uint8)
    reader.fit(40)  # half of it are five frames of four rows
    assert reader.read((shown, 1.0), modality="video").medium.num_rows == 20
    tight = open_reader(tmp_path, MediaLimits(max_frames=3))
    assert tight is not None and tight.read((shown, 1.0), modality="video").medium.num_rows == 12


def test_a_template_may_write_a_video_in_words(tmp_path: Path) -> None:
    """A template's text for a video becomes the placeholder for videos, and users cannot write this text."""
    reader, tokenizer = opened("smolvlm", tmp_path)
    assert tokenizer.id_of("<video>") is None
    places = {name: tokenizer.token_text(sense.placeholder) for name, sense in reader.senses.items()}
    look = Look(places, True, {"video": reader.senses["video"].written})
    video = {"type": "video", "video": [Image.new("RGB", (16, 16))]}
    prepare([{"role": "user", "content": [video]}], look)
    assert look.placed("User: <video>what") == "User: <global-img>what"
    for text in ("see <video>", "see <global-img>"):
        with pytest.raises(InvalidRequest, match="which is the placeholder of videos"):
            prepare(
                [{"role": "user", "content": [video, {"type": "text", "text": text}]}], Look(places, True, look.written)
            )


def test_pictures_are_read_without_a_token_for_videos(tmp_path: Path) -> None:
    """InternVL's token for videos is only in its tokenizer; older checkpoints without the token read images only."""
    vision_checkpoints.make_seeing("internvl", tmp_path)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(text.replace("<video>", "<|free|>"), encoding="utf-8")
    reader = open_reader(tmp_path)
    assert reader is not None and set(reader.senses) == {"image"}
    assert set(WATCHING) >= {"internvl", "smolvlm"}
