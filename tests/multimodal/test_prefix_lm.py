"""Tests of prompts whose tokens attend to the whole prompt.

Prompts have the same tokens as from transformers' processor. A prompt is computed in one chunk, and only an equal
prompt finds it in the prefix cache. An error says in one sentence why a prompt cannot be computed."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

from bridle import LLM
from bridle.config import ModelConfig
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http import create_app
from bridle.model import load_executor
from bridle.model.executor_builder import STEP_TOKENS
from bridle.multimodal import open_reader
from bridle.serving import ModelRegistry
from bridle.tokenizer import Tokenizer
from tests.fakes import vision_checkpoints

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (24, 30, 3), dtype=np.uint8))


def png(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoints.make_seeing("paligemma2", tmp_path_factory.mktemp("whole") / "eyes")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_blocks=128, block_size=4) as loaded:
        yield loaded


def ask(llm: LLM, text: str, seeds: int | list[int], **fields: Any) -> Any:
    images = [png(seed) for seed in seeds] if isinstance(seeds, list) else png(seeds)
    return llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, **(GREEDY | fields))[0]


@pytest.mark.parametrize(
    "text", ["caption en", "<image>caption en", "<image><image>what\n", "a<image>b<image>", "<image>", "x\n\n"]
)
def test_prompts_are_those_of_the_librarys_processor(text: str, folder: Path) -> None:
    reader, tokenizer = open_reader(folder), Tokenizer.load(folder)
    assert reader is not None and tokenizer.bos_token_id is not None
    images = [picture(seed) for seed in range(max(text.count("<image>"), 1))]
    processor = PaliGemmaProcessor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"), AutoTokenizer.from_pretrained(folder)
    )
    wanted = processor(images=images, text=text, return_tensors="np")
    pictures = [reader.read(image) for image in images]
    for begins in (False, True):  # with the token that begins a text in front, where tokenizers put it
        prompt = [tokenizer.bos_token_id] * begins + tokenizer.encode(text, add_special_tokens=False)
        placed, sights = reader.place(prompt, pictures, tokenizer)
        assert list(placed) == wanted["input_ids"][0].tolist()
        assert reader.place(placed_once(placed), pictures, tokenizer)[0] == placed  # it is complete
    pixels = [np.frombuffer(array.data, array.dtype).reshape(array.shape) for array in sights.media[0].arrays[1:]]
    assert (np.concatenate(pixels) == wanted["pixel_values"]).all()
    (run,) = sights.runs
    assert (run.position, run.length, run.is_mutual) == (0, len(placed), True)


def placed_once(tokens: tuple[int, ...]) -> list[int]:
    """Return a prompt's tokens with one placeholder for each image instead of four."""
    places = [number for number, token in enumerate(tokens) if token == vision_checkpoints.IMAGE]
    assert len(places) % 4 == 0
    return [token for number, token in enumerate(tokens) if number not in places or places.index(number) % 4 == 0]


def test_every_way_in_makes_the_same_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Request] = []
    submit = llm.model.client.submit

    def note(request: Request) -> Any:
        submitted.append(request)
        return submit(request)

    monkeypatch.setattr(llm.model.client, "submit", note)
    first = ask(llm, "caption en", 1)
    assert ask(llm, "<image>caption en", 1).outputs[0].text == first.outputs[0].text
    with TestClient(create_app(ModelRegistry([llm.model])), base_url="http://127.0.0.1") as http:
        inputs = f"![](data:image/png;base64,{base64.b64encode(png(1)).decode()})caption en"
        answer = http.post("/generate", json={"inputs": inputs, "parameters": {"max_new_tokens": 6}})
        assert answer.status_code == 200
    assert len(submitted) == 3
    assert len({(request.prompt, request.media[0].arrays) for request in submitted}) == 1
    assert {(run.position, run.length) for request in submitted for run in request.runs} == {(0, 15)}


def test_only_equal_prompts_of_a_tenant_share_kv(llm: LLM) -> None:
    def cached(text: str, seed: int, tenant: str = "") -> int:
        return int(ask(llm, text, seed, tenant=tenant).num_cached_tokens or 0)

    assert cached("where is it", 11) == 0
    assert cached("where is it", 11) >= 12
    assert cached("where is he", 11) == 0  # what comes later is seen by what comes before
    assert cached("where is it", 12) == 0
    assert cached("where is it", 11, "a") == 0
    assert cached("where is it", 11, "b") == 0
    assert cached("where is it", 11, "a") >= 12


def test_what_cannot_be_right_is_refused(llm: LLM, folder: Path) -> None:
    with pytest.raises(UnsupportedFeature, match="attend to later tokens"):
        ask(llm, "caption en", 1, prompt_logprobs=1)
    text = "no picture at all"  # is in causal order, as the library's
    assert llm.generate(text, prompt_logprobs=1, **GREEDY)[0].prompt_logprobs
    with pytest.raises(InvalidRequest, match="placeholders for 1 images, each '<image>', but 2 were sent"):
        ask(llm, "<image>caption en", [1, 2])
    with LLM(str(folder), num_blocks=64, block_size=4, max_batch_prefill_tokens=10) as narrow:
        with pytest.raises(InvalidRequest, match=r"a prompt with images takes 15 tokens, .* a step has at most 10"):
            ask(narrow, "caption en", 1)
        assert narrow.generate("a longer text than ten tokens", **GREEDY)[0].outputs[0].text


def test_steps_have_room_for_a_prompt(folder: Path) -> None:
    executor = load_executor(ModelConfig(str(folder), num_blocks=64, block_size=4))
    try:
        assert executor.info.max_num_batched_tokens == STEP_TOKENS["cpu"] + 4
    finally:
        executor.close()
