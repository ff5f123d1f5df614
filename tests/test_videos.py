"""Tests of videos on every API: the same video and text give the same prompt and the same answer."""

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

from bridle import LLM
from bridle.engine.request import Request
from bridle.errors import InvalidRequest
from tests.fakes import vision_checkpoints
from tests.lmtp.harness import Setup

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
TEXT = "What happens?"
SAID = {"type": "text", "text": TEXT}


def frames(seed: int = 0, count: int = 4) -> list[Image.Image]:
    numbers = np.random.RandomState(seed).randint(0, 255, (count, 24, 30, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in numbers]


def pngs(seed: int = 0) -> list[str]:
    found = []
    for frame in frames(seed):
        file = io.BytesIO()
        frame.save(file, "PNG")
        found.append(base64.b64encode(file.getvalue()).decode())
    return found


def webp(seed: int = 0) -> bytes:
    file = io.BytesIO()
    first, *rest = frames(seed)
    first.save(file, "WEBP", save_all=True, append_images=rest, duration=500, lossless=True)
    return file.getvalue()


URL = f"data:image/webp;base64,{base64.b64encode(webp()).decode()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoints.make_seeing("qwen2_5_vl", tmp_path_factory.mktemp("eyes") / "qwen")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_blocks=128, block_size=4) as loaded:
        yield loaded


def places(request: Request) -> tuple[Any, ...]:
    return tuple((run.position, run.length, run.grid, run.pace, run.key) for run in request.runs)


def test_every_shape_makes_the_same_prompt(llm: LLM, http: TestClient, submitted: list[Request]) -> None:
    """Frames of a list count as half a second apart, like the frames of the video file."""
    urls = [f"data:image/png;base64,{one}" for one in pngs()]
    shapes = [
        {"type": "video_url", "video_url": {"url": URL}},
        {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(pngs())}"}},
        {"type": "video", "video": urls},
    ]
    answers = set()
    for shape in shapes:
        asked = {"messages": [{"role": "user", "content": [shape, SAID]}], **GREEDY}
        answers.add(http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"])
    array = np.stack([np.asarray(frame) for frame in frames()])
    values: list[Any] = [webp(), URL, frames(), array, (array, 2.0)]
    for value in values:
        output = llm.chat([{"role": "user", "content": [{"type": "video", "video": value}, SAID]}], **GREEDY)[0]
        assert output.outputs[0].message is not None
        answers.add(output.outputs[0].message.content)
    assert len(answers) == 1 and len(submitted) == 8
    assert {request.prompt for request in submitted} == {submitted[0].prompt}
    for mine in (submitted[:3], submitted[3:]):  # keys are a tenant's
        assert {places(request) for request in mine} == {places(mine[0])}
    assert [run.grid for run in submitted[0].runs] == [(2, 3, 4)]


def test_prompts_take_them_beside_pictures(llm: LLM, submitted: list[Request], tmp_path: Path) -> None:
    (tmp_path / "it.webp").write_bytes(webp())
    place = "<|vision_start|><|video_pad|><|vision_end|>"
    array = np.stack([np.asarray(frame) for frame in frames()])
    for value in (str(tmp_path / "it.webp"), [webp()], frames(), array, [array], [(array, 2.0)], [frames()]):
        llm.generate({"prompt": f"{place}{TEXT}", "multi_modal_data": {"video": value}}, **GREEDY)
    assert len({places(request) for request in submitted}) == 1
    both = {"prompt": f"<|image_pad|>{place}", "multi_modal_data": {"video": webp(), "image": frames()[0]}}
    llm.generate(both, **GREEDY)
    assert [run.grid for run in submitted[-1].runs] == [(1, 3, 4), (2, 3, 4)]
    with pytest.raises(InvalidRequest, match=r"placeholders for 2 videos, each '<\|video_pad\|>', but 1 were sent"):
        llm.generate({**both, "prompt": f"<|image_pad|>{place}{place}"}, **GREEDY)


REFUSED: list[tuple[Any, str]] = [
    ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "reads only text, images and videos"),
    ([{"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/x.mp4"}}], "the video itself, as data:video/"),
    ([{"type": "video", "video": "/etc/hostname"}], "this server does not fetch"),
    ([{"type": "video", "video": ["/etc/hostname"]}], "this server does not fetch"),
    ([{"type": "video", "video": [[0, 0], [0, 0]]}], "must be bytes, a path, an array"),
    ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "cannot be read: it is damaged"),
    ([{"type": "video_url", "video_url": {"url": URL}}] * 5, "5 videos were sent; at most 4"),
    (
        [{"type": "video_url", "video_url": {"url": URL}}, {"type": "text", "text": "<|video_pad|>"}],
        "the placeholder of videos",
    ),
]


@pytest.mark.parametrize(("parts", "why"), REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(http: TestClient, parts: Any, why: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], **GREEDY})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_models_say_what_they_read(http: TestClient) -> None:
    (row,) = http.get("/v1/models").json()["data"]
    assert row["input_modalities"] == ["text", "image", "video"] and row["reads_pictures"] is True
    assert http.get("/info").json()["input_modalities"] == ["text", "image", "video"]


async def test_lmtp_takes_them(llm: LLM) -> None:
    prompt = f"<|video_pad|>{TEXT}"
    wanted = llm.generate({"prompt": prompt, "multi_modal_data": {"video": webp()}}, **GREEDY)[0].outputs[0]
    setup = Setup(llm.model)
    wire = setup.connect()
    try:
        (hello,) = await wire.ask("MODEL_INFO", model=llm.model.name)
        assert hello["model_info"]["lmtp"]["video"] is True
        found = await wire.ask("GENERATE", model=llm.model.name, prompt=prompt, **GREEDY, video=[URL])
        assert [body["token"] for body in found] == list(wanted.token_ids)
    finally:
        await setup.server.close()
