"""Tests that models that also take images give transformers' logits for text, alone and in whole engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from bridle.errors import UnsupportedModel
from bridle.model.check import check_model
from bridle.model.support_checks import VISION_FAMILIES
from bridle.serving.models.export import quantize_model
from dev.bench.family_configs import tiny_config
from tests.fakes import tiny_checkpoints, vision_checkpoints
from tests.model.driver import NaiveDriver, load, skip_older

PROMPTS = [[1, *range(20, 44)], [1, 77, 90, 78], [1, 50, 51]]


def test_every_family_is_tried() -> None:
    assert {vision_checkpoints.MODEL_TYPES.get(name, name) for name in vision_checkpoints.FAMILIES} == VISION_FAMILIES


@pytest.mark.few(6)
@pytest.mark.parametrize("family", vision_checkpoints.FAMILIES)
def test_text_equals_the_library(family: str, tmp_path: Path) -> None:
    skip_older(family)
    report = check_model(vision_checkpoints.make_seeing(family, tmp_path), max_tokens=48)
    assert report.is_equal
    # Of logits above 15. The library computes a delta rule in blocks of tokens.
    assert report.max_error < (5e-4 if family.startswith("qwen3_5") else 1e-4)


def _make_unlisted(family: str, folder: Path, **fields: Any) -> Path:
    """Make a checkpoint of a family for which the tests have no configuration but the default one."""
    config = tiny_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    model = AutoModelForImageTextToText.from_config(config)
    tiny_checkpoints.randomize(model, 0)
    model.save_pretrained(folder)
    return folder


#: Those whose head does more than multiply are among them, and Gemma 4, whose text files have no part for images.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("cohere2_vision", {}),
        ("gemma4", {}),
        ("llama4", {}),
        ("gemma4", {"vision_config": None, "audio_config": None}),
        ("granite_docling", {}),
        ("muse_glimmer", {}),
    ],
)
def test_text_of_an_unlisted_family_equals_the_whole_model(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    folder = _make_unlisted(family, tmp_path, **fields)
    assert check_model(folder, max_tokens=48).is_equal
    found = NaiveDriver(load(folder), PROMPTS).generate(3)
    whole = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    for prompt, drawn in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = whole(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == drawn


def test_a_head_of_an_unknown_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader compares text logits with the whole model's, so a head of an unknown form is refused."""
    folder = _make_unlisted("granite_docling", tmp_path)
    monkeypatch.setattr("bridle.model.language_model._ways", lambda config: [(1.0, None)])
    with pytest.raises(UnsupportedModel, match="'granite_docling' would give wrong results"):
        load(folder)


def test_text_is_generated_as_by_the_library(tmp_path: Path) -> None:
    folder = vision_checkpoints.make_seeing("llava", tmp_path)
    executor = load(folder)
    found = NaiveDriver(executor, PROMPTS).generate(6)
    whole = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    assert executor.num_bytes > sum(weight.numel() * 4 for weight in whole.parameters())  # the tower counts
    for prompt, drawn in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = whole(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == drawn
    executor.close()


def test_experts_may_lie_either_way_round(tmp_path: Path) -> None:
    """Expert matrices load in the order of published files and in that of transformers. Matrices with the same shape in
    both orders are refused."""
    folder = vision_checkpoints.make_seeing("qwen3_vl_moe", tmp_path / "model")
    found = []
    for _ in range(2):
        executor = load(folder)
        found.append(NaiveDriver(executor, PROMPTS).generate(6))
        executor.close()
        weights = load_file(folder / "model.safetensors")
        turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in weights.items()}
        save_file(turned, folder / "model.safetensors", {"format": "pt"})
    assert found[0] == found[1]
    for inner in (16, 32):
        square = vision_checkpoints.make_seeing("qwen3_vl_moe", tmp_path / str(inner), moe_intermediate_size=inner)
        with pytest.raises(UnsupportedModel, match=f"experts of size {inner} at a hidden size of 32"):
            load(square)


def test_weights_that_the_tower_lacks_are_named(tmp_path: Path) -> None:
    folder = vision_checkpoints.make_seeing("llava", tmp_path)
    weights = load_file(folder / "model.safetensors")
    gone = next(name for name in weights if "vision" in name)
    save_file({name: t for name, t in weights.items() if name != gone}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="lacks 1 weights of LlavaForConditionalGeneration"):
        load(folder)


def test_what_is_not_served_says_why(tmp_path: Path) -> None:
    folder = vision_checkpoints.make_seeing("internvl", tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="only text models can be written"):
        quantize_model(str(folder), tmp_path / "out.gguf", "Q8_0")
