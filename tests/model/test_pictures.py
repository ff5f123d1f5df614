"""Tests that prompts with images give the logits of transformers' eager pass over pixels.

Prompts are computed in chunks that split images, packed with other requests, decoded, after preemption, and from the
prefix cache. The tests also check that wrong inputs change the logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.engine.multimodal.multimodal_inputs import (
    MultiModalInputs,
    MultiModalItem,
    is_whole,
)
from bridle.engine.request import Request
from bridle.errors import MediaRefused
from bridle.model import media_device
from bridle.model.batch_inputs import grid_positions
from bridle.model.executor import LocalExecutor
from bridle.model.image_feature_cache import PictureRows
from bridle.model.media_encoder import Features, MediaEncoder
from bridle.multimodal import FAMILIES, open_reader
from bridle.sampling import SamplingParams
from bridle.tokenizer import Tokenizer
from tests.covering import slow_but
from tests.fakes import vision_checkpoints
from tests.fakes.torchvision_functions import provide_processor
from tests.model.driver import load, skip_older
from tests.model.image_prompts import DELTA_LIMIT, LIMIT, Eyes, Prompt, error, make_ready, play, pool_of, run_packed

#: Rows that see each other, one tower for all, positions in three axes, layers that get rows, experts, tiles.
KINDS = {"gemma3", "gemma4", "llava", "paligemma", "qwen2_vl", "qwen3_vl_moe", "smolvlm", "pixtral"}


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str) -> Eyes:
        skip_older(family)
        folder = vision_checkpoints.make_seeing(family, tmp_path_factory.mktemp(family))
        whole = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        reader = open_reader(folder)
        assert reader is not None
        provide_processor(family, reader)
        return Eyes(family, folder, whole, reader, Tokenizer.load(folder))

    return make


@pytest.fixture
def executor(eyes: Any, request: pytest.FixtureRequest) -> Iterator[LocalExecutor]:
    family = request.getfixturevalue("family")
    loaded = load(eyes(family).folder, num_blocks=640 if family == "deepseek_ocr2" else 128)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("family", slow_but(KINDS, [*FAMILIES, *vision_checkpoints.MODEL_TYPES]))
def test_logits_are_those_of_the_library(family: str, eyes: Any, executor: LocalExecutor) -> None:
    mine: Eyes = eyes(family)
    one, two = mine.picture(1), mine.picture(2)
    prompts = [
        mine.prompt("look ", one, " here ", two, " and say"),
        mine.prompt("only text here"),
        mine.prompt(mine.picture(3, 50, 9), "x"),
    ]
    turned = mine.prompt("look ", two, " here ", one, " and say")
    make_ready(executor, [medium for prompt in (*prompts, turned) for medium in prompt.media])
    wanted = [mine.logits(prompt) for prompt in prompts]
    for chunks in ((300,), (5, 1, 9, 2)):  # pictures whose rows see each other are never cut
        for found, want in zip(run_packed(executor, prompts, chunks), wanted, strict=True):
            assert error(found, want) < (DELTA_LIMIT if family.startswith("qwen3_5") else LIMIT)
    swapped = replace(prompts[0], runs=turned.runs)
    assert error(run_packed(executor, [swapped], (300,))[0], wanted[0]) > 1000 * LIMIT
    if prompts[0].runs[0].is_mutual:  # in order, as text is
        causal = replace(prompts[0], runs=tuple(replace(run, is_mutual=False) for run in prompts[0].runs))
        assert error(run_packed(executor, [causal], (300,))[0], wanted[0]) > 1000 * LIMIT
    if prompts[0].runs[0].grid is not None:  # without their places in the picture
        flat = replace(prompts[0], runs=tuple(replace(run, grid=None) for run in prompts[0].runs))
        assert error(run_packed(executor, [flat], (300,))[0], wanted[0]) > 1000 * LIMIT


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_rows_see_each_other_in_layers_with_windows_alone(kernel: str, eyes: Any) -> None:
    mine: Eyes = eyes("gemma4_mutual")
    executor, prompt = load(mine.folder, kernel=kernel), mine.prompt("a", mine.picture(1), "b", mine.picture(2), "c")
    make_ready(executor, prompt.media)
    assert error(run_packed(executor, [prompt], (30, 7))[0], mine.logits(prompt)) < LIMIT
    executor.close()


@pytest.mark.parametrize("family", ["cohere_compass", "qwen3_vl", "qwen3_vl_moe"])
def test_what_pictures_add_to_later_layers_counts(family: str, eyes: Any, executor: LocalExecutor) -> None:
    prompt = eyes(family).prompt("a", eyes(family).picture(1), "b")
    make_ready(executor, prompt.media)
    assert executor.media is not None
    features = executor.media.kept_features
    features.update({key: Features(found.rows) for key, found in features.items()})
    assert error(run_packed(executor, [prompt], (300,))[0], eyes(family).logits(prompt)) > 1000 * LIMIT


@pytest.mark.parametrize("family", ["qwen3_vl_moe"])
def test_rows_of_pictures_go_through_their_own_experts(family: str, eyes: Any) -> None:
    mine: Eyes = eyes(family)
    prompt, executor = mine.prompt("a", mine.picture(1), "b"), load(mine.folder)
    make_ready(executor, prompt.media)
    assert executor.runner is not None
    routers = [tensor for name, tensor in executor.runner.model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for router in routers:
        router.copy_(router.roll(1, 0))
    assert error(run_packed(executor, [prompt], (300,))[0], mine.logits(prompt)) > 1000 * LIMIT
    executor.close()


def unlike(mine: Eyes, prompt: Prompt) -> Prompt:
    """Return a prompt with the same tokens and a different first image, to which the model answers differently."""
    answer = mine.logits(prompt)[-1, : vision_checkpoints.IMAGE].argmax()
    for seed in range(5, 200):
        other = mine.prompt("look ", mine.picture(seed), " here ", prompt.pictures[1], " say")
        if mine.logits(other)[-1, : vision_checkpoints.IMAGE].argmax() != answer:
            return other
    raise AssertionError("no picture makes a difference")


def asked(name: str, prompt: Prompt, **fields: Any) -> Request:
    n, bias = (
        fields.pop("n", 1),
        {vision_checkpoints.IMAGE: -1000.0},
    )  # the library takes each placeholder for a picture
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=n, logit_bias=bias)
    return Request(name, prompt.tokens, sampling, media=prompt.media, runs=prompt.runs, **fields)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "family",
    [
        *("ernie4_5_vl_moe", "gemma3", "gemma4", "kimi_k25", "lfm2_vl", "llava", "ovis2", "paddleocr_vl"),
        *("paligemma", "paligemma2", "qwen2_vl", "qwen3_vl_moe", "smolvlm"),
    ],
)
@pytest.mark.parametrize(("is_small", "budget"), [(False, 64), (True, 9)])
def test_engines_draw_what_the_library_would(family: str, is_small: bool, budget: int, eyes: Any) -> None:
    """Prompts run together in a pool that is too small for all, alone, again from the prefix cache, and with different
    pixels."""
    mine: Eyes = eyes(family)
    first = mine.prompt("look ", mine.picture(1), " here ", mine.picture(2), " say")
    prompts = {
        "first": first,
        "again": first,
        "other": unlike(mine, first),
        "text": mine.prompt("no picture at all, but a long text"),
    }
    assert prompts["other"].tokens == first.tokens
    executor = load(mine.folder, sampler=None, num_blocks=len(first.tokens) // 4 + 18 if is_small else 256)
    if is_whole(first.runs, len(first.tokens)):
        budget = max(budget, len(first.tokens))
    if is_small:  # all is there from the start: then who is preempted is the same each time
        make_ready(executor, [medium for prompt in prompts.values() for medium in prompt.media])
    engine = Engine(executor, EngineConfig(max_num_batched_tokens=budget), media=pool_of(executor))
    requests = [asked(name, prompt, n=16 if name == "again" else 1) for name, prompt in prompts.items()]
    outputs, _ = play(engine, requests)
    for late in ("first", "other", "text"):
        found, finished = play(engine, [asked(f"late-{late}", prompts[late])])
        outputs[late, 9] = found[f"late-{late}", 0]
        if not is_small:
            assert finished[0].usage.cached_tokens >= len(prompts[late].tokens) // 4 * 4 - 4
    for (name, _), drawn in outputs.items():
        logits = mine.logits(prompts[name], drawn)[len(prompts[name].tokens) - 1 : -1]
        assert logits[:, : vision_checkpoints.IMAGE].argmax(-1).tolist() == drawn
    assert outputs["first", 0][0] != outputs["other", 0][0]
    statistics = engine.statistics()
    assert (statistics.num_preemptions > 0) == is_small
    assert statistics.num_media_encoded == len({medium.key for prompt in prompts.values() for medium in prompt.media})
    engine.close()


@pytest.mark.parametrize("family", ["llava"])
def test_a_picture_of_another_size_ends_its_request_alone(family: str, eyes: Any) -> None:
    mine: Eyes = eyes(family)
    executor = load(mine.folder)
    engine = Engine(executor, media=pool_of(executor))
    good = mine.prompt("a", mine.picture(1), "b")
    medium = replace(good.media[0], key=b"?" * 16, num_rows=good.media[0].num_rows - 1)
    run = replace(good.runs[0], key=medium.key, length=medium.num_rows)
    bad = replace(good, media=(medium,), runs=(run,))
    _, finished = play(engine, [asked("bad", bad), asked("good", good)])
    errors = {event.request_id: event.error for event in finished}
    assert isinstance(errors["bad"], MediaRefused)
    assert errors["good"] is None
    engine.close()


@pytest.mark.few(5)
@pytest.mark.parametrize("family", sorted({*FAMILIES, *vision_checkpoints.MODEL_TYPES} - {"paligemma", "paligemma2"}))
def test_pictures_of_one_shape_are_encoded_together(
    family: str, eyes: Any, executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of one shape are encoded in one batch on a GPU, beside images of other shapes, with the same logits up to
    rounding."""
    mine: Eyes = eyes(family)
    like, odd = [mine.picture(seed) for seed in (1, 2, 3)], mine.picture(4, 50, 9)
    prompt = mine.prompt("look ", like[0], odd, like[1], " and ", like[2])
    assert executor.media is not None
    assert executor.media.together(prompt.media) == [prompt.media[0]], "not on a CPU"
    monkeypatch.setattr(MediaEncoder, "is_on_cpu", False)
    monkeypatch.setattr(media_device, "run_after", None)
    is_odd = (
        odd.medium.arrays[0].shape != like[0].medium.arrays[0].shape or odd.medium.num_rows != like[0].medium.num_rows
    )
    assert len(executor.media.together(prompt.media)) == 4 - is_odd
    make_ready(executor, prompt.media)
    for medium in prompt.media:
        alone, found = executor.media.encoder.encode(medium), executor.media.features(medium.key)
        for one, other in zip((alone.rows, *alone.further), (found.rows, *found.further), strict=True):
            assert one.shape == other.shape and error(other, one) < LIMIT
            assert other.untyped_storage().nbytes() == other.nbytes, "a part would keep the whole"


@pytest.mark.parametrize("family", ["llava"])
def test_a_batch_has_no_more_numbers_than_a_picture_may(
    family: str, eyes: Any, executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine: Eyes = eyes(family)
    media = [mine.picture(seed).medium for seed in range(20)]
    assert executor.media is not None
    monkeypatch.setattr(MediaEncoder, "is_on_cpu", False)
    assert executor.media.together(media) == media[: media_device.MAX_TOGETHER]
    monkeypatch.setattr(media_device, "MAX_TOGETHER_BYTES", 3 * media[0].num_bytes)
    assert executor.media.together(media) == media[:3]
    monkeypatch.setattr(media_device, "MAX_TOGETHER_BYTES", 1)
    assert executor.media.together(media) == media[:1]


@pytest.mark.parametrize("family", ["paligemma", "paligemma2"])
def test_a_picture_of_an_earlier_prompt_is_known(
    family: str, eyes: Any, executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of an earlier prompt is encoded only once for equal pixels of the same tenant."""
    mine: Eyes = eyes(family)
    one, two = mine.picture(1), mine.picture(2)
    prompts = [mine.prompt("look ", one), mine.prompt(two, one, " and say"), mine.prompt("what is it ", one)]
    assert executor.media is not None
    inner, encoded = executor.media.encoder._inner, []
    encode = inner.get_image_features
    monkeypatch.setattr(inner, "get_image_features", lambda **given: encoded.append(given) or encode(**given))
    make_ready(executor, [medium for prompt in prompts for medium in prompt.media])
    assert len(encoded) == 2
    fresh = load(mine.folder)
    assert fresh.media is not None
    for prompt in prompts:
        (medium,) = prompt.media
        fresh.media.clear()
        make_ready(fresh, [medium])
        assert torch.equal(executor.media.features(medium.key).rows, fresh.media.features(medium.key).rows)
        assert error(run_packed(executor, [prompt], (300,))[0], mine.logits(prompt)) < LIMIT
    fresh.close()
    theirs = [MultiModalInputs(prompt.media, prompt.runs).of("somebody").media for prompt in prompts]
    make_ready(executor, [medium for media in theirs for medium in media])
    assert len(encoded) == 4
    executor.media.clear()
    make_ready(executor, prompts[0].media)
    assert len(encoded) == 5


def test_known_pictures_keep_to_their_bytes() -> None:
    known, rows = PictureRows(100), torch.zeros(10, 1)  # 40 bytes
    known.keep(b"large", torch.zeros(26))
    assert known.find(b"large") is None
    for key in (b"a", b"b"):
        known.keep(key, rows)
    assert known.find(b"a") is rows
    known.keep(b"c", rows)
    assert [known.find(key) is rows for key in (b"a", b"b", b"c")] == [True, False, True]
    known.clear()
    assert known.find(b"a") is None


@pytest.mark.parametrize("family", ["qwen2_vl"])
def test_positions_are_those_of_the_library(family: str, eyes: Any) -> None:
    mine: Eyes = eyes(family)
    parts = ("ab", mine.picture(1), "c", mine.picture(2, 50, 9), "d", mine.picture(3, 11, 31), "e")
    prompt = mine.prompt(*parts)
    ids = torch.tensor([prompt.tokens])
    grids = torch.cat([mine._pixels(replace(prompt, pictures=[p]))["image_grid_thw"] for p in prompt.pictures])
    wanted, _ = mine.whole.model.get_rope_index(ids, (ids == vision_checkpoints.IMAGE).int(), image_grid_thw=grids)
    num = len(prompt.tokens)
    for start in range(num):
        for end in (start + 1, min(start + 7, num), num):
            found = grid_positions(prompt.runs, start, end)
            assert (found == wanted[:, 0, start:end].numpy()).all()


@pytest.mark.parametrize("family", ["llava"])
def test_pictures_are_encoded_behind_the_steps(
    family: str, eyes: Any, executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A separate thread encodes each image and then ends, so that its OpenMP workers end as well."""
    threads: list[threading.Thread] = []
    encode = MediaEncoder.encode

    def noted(self: MediaEncoder, medium: MultiModalItem) -> Features:
        threads.append(threading.current_thread())
        return encode(self, medium)

    monkeypatch.setattr(MediaEncoder, "encode", noted)
    make_ready(executor, eyes(family).prompt("a", eyes(family).picture(31)).media)
    (thread,) = threads
    thread.join(120)
    assert thread.name == "bridle-encode" and not thread.is_alive()
