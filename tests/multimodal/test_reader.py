"""Tests of the image reader: it gives the same result each time, has a cache, and does not need torch."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.multimodal import FAMILIES, MediaLimits, MediaReader, Source, open_reader, source_of
from bridle.multimodal.image_processor import ImageProcessor
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_template import Look, prepare
from tests.fakes import vision_checkpoints
from tests.fakes.torchvision_functions import provide_processor
from tests.model.driver import skip_older


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoints.make_seeing("llava", tmp_path_factory.mktemp("reader"))


@pytest.fixture
def reader(folder: Path) -> MediaReader:
    found = open_reader(folder, MediaLimits(max_images=3, max_total_bytes=20_000))
    assert found is not None
    return found


def png(seed: int, side: int = 30) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.RandomState(seed).randint(0, 255, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_the_same_file_is_read_once(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.multimodal.reader.KEPT_BYTES", 2 * 3 * 16 * 16 * 4)
    first = reader.read(png(1))
    assert reader.read(png(1)) is first
    assert reader.read(png(2)).medium.key != first.medium.key
    reader.read(png(3))
    again = reader.read(png(1))  # others took its place
    assert again is not first and again == first
    low = reader.read(png(1), max_shown_pixels=100)
    assert low.medium.key != first.medium.key


def test_limits_of_a_request(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(reader.read_all([Source(png(1), "a"), Source(png(1), "b")])) == 2
    with pytest.raises(MediaRefused, match="4 images were sent; at most 3"):
        reader.read_all([Source(png(1), "a")] * 4)
    with pytest.raises(MediaRefused, match="bytes; at most 20000"):
        reader.read_all([Source(png(1, 80), "a"), Source(png(2, 80), "b")])
    monkeypatch.setattr(reader, "limits", MediaLimits(max_array_bytes=2 * 3 * 16 * 16 * 4))
    with pytest.raises(MediaRefused, match="the decoded images have 9216 bytes; at most 6144"):
        reader.read_all([Source(png(seed), "a") for seed in range(3)])


def test_keys_are_a_tenants(folder: Path, reader: MediaReader) -> None:
    _, sights = reader.place([reader.placeholder], [reader.read(png(1))], Tokenizer.load(folder))
    theirs = [sights.of(tenant) for tenant in ("", "a", "b")]
    assert theirs[0] is sights
    assert len({each.media[0].key for each in theirs}) == 3
    assert all(each.runs[0].key == each.media[0].key for each in theirs)


def test_low_detail_is_asked_for() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}
    found = source_of(part, "here")
    assert found is not None and found.is_low
    assert source_of({"type": "text", "text": "x"}, "here") is None


def test_a_checkpoint_without_a_processor_says_so(tmp_path: Path) -> None:
    folder = vision_checkpoints.make_seeing("llava", tmp_path)
    (folder / "preprocessor_config.json").unlink()
    reader = open_reader(folder)
    assert reader is not None
    with pytest.raises(UnsupportedFeature, match="image processor cannot be used"):
        reader.read(png(1))


def test_models_of_text_have_no_reader(tmp_path: Path) -> None:
    assert open_reader(tmp_path) is None
    for config in ('{"model_type": "llama"}', '{"model_type": "gemma4", "vision_config": null}'):
        (tmp_path / "config.json").write_text(config)
        assert open_reader(tmp_path) is None


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_for_torchvision_alone_says_so(tmp_path: Path) -> None:
    reader = open_reader(vision_checkpoints.make_seeing("kimi_k25", tmp_path))
    assert reader is not None
    with pytest.raises(UnsupportedFeature, match="transformers needs torchvision for it: install"):
        reader.read(png(1))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from bridle.multimodal import open_reader
reader = open_reader(Path(sys.argv[1]))
print(reader.read(sys.stdin.buffer.read()).medium.key.hex())
"""


@pytest.mark.slow
def test_pictures_are_read_without_torch(folder: Path, reader: MediaReader) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(folder)]
    done = subprocess.run(command, input=png(5), capture_output=True, check=True)
    assert done.stdout.decode().strip() == reader.read(png(5)).medium.key.hex()


def processor_of(reader: MediaReader) -> Any:
    sense = reader.senses["image"]
    assert isinstance(sense, ImageProcessor)
    return sense.processor()


PROCESSORS = {
    "aya_vision": ("aya_vision", "AyaVisionProcessor"),
    "cohere2_vision": ("cohere2_vision", "Cohere2VisionProcessor"),
    "deepseek_ocr2": ("deepseek_ocr2", "DeepseekOcr2Processor"),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeProcessor"),
    "gemma4": ("gemma4", "Gemma4Processor"),
    "idefics3": ("idefics3", "Idefics3Processor"),
    "internvl": ("internvl", "InternVLProcessor"),
    "kimi_k25": ("kimi_k25", "Kimi_K25Processor"),
    "lfm2_vl": ("lfm2_vl", "Lfm2VlProcessor"),
    "ovis2": ("ovis2", "Ovis2Processor"),
    "paddleocr_vl": ("paddleocr_vl", "PaddleOCRVLProcessor"),
    "smolvlm": ("idefics3", "Idefics3Processor"),
}
_FAKE, _GLOBAL = vision_checkpoints.names_of("idefics3")[1:3]
_IDEFICS = {"fake_image_token": _FAKE, "global_image_tag": _GLOBAL, "image_seq_len": 4}
#: Attributes of processors, for checkpoints of tests.
MARKS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "img_patch_token": "<|IMG_PATCH|>",
        "start_of_img_token": "<|START_OF_IMG|>",
        "end_of_img_token": "<|END_OF_IMG|>",
        "tile_token": "TILE",
        "tile_global_token": "TILE_GLOBAL",
        "img_size": 16,
        "patch_size": 8,
    },
    "cohere2_vision": {
        "patch_size": 2,
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    },
    "deepseek_ocr2": {"patch_size": 1, "downsample_ratio": 4},
    "gemma4": {"boi_token": "<|image>", "eoi_token": "<image|>"},
    "idefics3": _IDEFICS,
    "internvl": {"start_image_token": "<img>", "end_image_token": "</img>", "image_seq_length": 4},
    "lfm2_vl": {
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
    "ovis2": {"image_seq_length": 4},
    "smolvlm": _IDEFICS,
}


def library_text(family: str, reader: MediaReader, results: Any) -> str:
    """Return transformers' replacement for an image placeholder, computed without creating a processor."""
    names = vision_checkpoints.names_of(family)
    marks = SimpleNamespace(**MARKS.get(family, {}), image_token=names[0], image_processor=processor_of(reader))
    module, name = PROCESSORS[family]
    processor = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), name)
    for helper in (name for name in vars(processor) if name.startswith(("_build", "_compute", "_get_image"))):
        setattr(marks, helper, MethodType(getattr(processor, helper), marks))
    return str(processor.replace_image_token(marks, results, 0, use_image_special_tokens=True))


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("size", [(24, 30), (16, 16), (9, 50), (40, 40)])
def test_marker_tokens_are_those_of_the_library(family: str, size: tuple[int, int], tmp_path: Path) -> None:
    skip_older(family)
    reader = open_reader(vision_checkpoints.make_seeing(family, tmp_path))
    assert reader is not None
    provide_processor(family, reader)
    tokenizer = Tokenizer.load(tmp_path)
    image = Image.fromarray(np.random.RandomState(3).randint(0, 255, (*size, 3), dtype=np.uint8))
    results = processor_of(reader)(images=[image], return_tensors="np", **(FAMILIES[family].options or {}))
    wanted = tokenizer.encode(library_text(family, reader, results), add_special_tokens=False)
    placed, _ = reader.place([reader.placeholder], [reader.read(image)], tokenizer)
    assert list(placed) == wanted


def test_a_template_may_write_a_picture_in_words(tmp_path: Path) -> None:
    """Aya Vision's template writes images as text, which becomes the placeholder; users cannot write this text."""
    folder = vision_checkpoints.make_seeing("aya_vision", tmp_path)
    reader, tokenizer = open_reader(folder), Tokenizer.load(folder)
    assert reader is not None and tokenizer.id_of("<image>") is None
    look = Look({"image": tokenizer.token_text(reader.placeholder)}, True, {"image": reader.senses["image"].written})
    said = [{"type": "image", "image": png(1)}, {"type": "text", "text": "What?"}]
    messages = prepare([{"role": "user", "content": said}], look)
    tokens = tokenizer.encode(look.placed(tokenizer.chat_template.render(messages, None, None, {})), False)
    assert tokens.count(reader.placeholder) == 1
    for text in ("see <image>", "see <|IMG_PATCH|>"):
        with pytest.raises(InvalidRequest, match="which is the placeholder of images"):
            prepare([{"role": "user", "content": [*said, {"type": "text", "text": text}]}], Look(*_words(look)))
    assert Look(*_words(look)).placed("an <image> of speech") == "an <image> of speech"


def _words(look: Look) -> tuple[Mapping[str, str], bool, Mapping[str, str]]:
    return look.placeholders, look.takes_parts, look.written


class Lines:
    """A fake tokenizer that merges neighbouring line ends into one token, as large vocabularies do."""

    MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")

    def __init__(self, placeholder: int, row: int) -> None:
        self.texts = {placeholder: self.MARKS[0], row: self.MARKS[2]}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        found = []
        for part in re.findall("|".join((*self.MARKS, r"\n+", ".")), text):
            known = next((token for token, each in self.texts.items() if each == part), None)
            found.append(1000 + len(self.texts) if known is None else known)
            self.texts[found[-1]] = part
        return found

    def token_text(self, token: int) -> str:
        return self.texts[token]


@pytest.mark.parametrize("text", ["user\n{}What?", "{}", "a\n\n{}\n\nb{}\n", "{}{}", "a {} b", "{}\n{}"])
def test_line_ends_around_a_picture_are_taken_together(text: str, tmp_path: Path) -> None:
    """Line ends of the prompt and of an image's replacement are merged, as if the whole text were tokenized at once."""
    reader = open_reader(vision_checkpoints.make_seeing("gemma3", tmp_path))
    assert reader is not None
    start, end, row = Lines.MARKS
    lines = Lines(reader.placeholder, vision_checkpoints.IMAGE)
    pictures = [reader.read(png(1))] * text.count("{}")
    placed, sights = reader.place(lines.encode(text.replace("{}", start)), pictures, lines)
    whole = text.replace("{}", f"\n\n{start}{row * 4}{end}\n\n")
    assert [lines.token_text(token) for token in placed] == [lines.token_text(token) for token in lines.encode(whole)]
    assert all(
        run.is_mutual and set(placed[run.position : run.end]) == {vision_checkpoints.IMAGE} for run in sights.runs
    )
    with pytest.raises(InvalidRequest, match="has the reserved text"):
        reader.place([vision_checkpoints.IMAGE, reader.placeholder], pictures[:1], lines)
