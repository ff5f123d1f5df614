"""Tests of sounds on every API: the same sound and text give the same prompt and the same answer."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle import LLM
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.multimodal import ImageHosts, MediaLimits
from bridle.multimodal.limits import LEAST_RATE, MOST_CHANNELS, MOST_FRAME_PIXELS, MOST_RATE
from bridle.multimodal.video_decoding import CHOSEN_RATE
from bridle.multimodal.video_processor import Frames
from tests.fakes import audio_checkpoints
from tests.lmtp.harness import Setup
from tests.multimodal.clips import TEXT, noise, wav
from tests.multimodal.picture_server import served_pictures
from tests.sources import ROOT

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


def encoded(seed: int = 0) -> str:
    return base64.b64encode(wav(seed)).decode()


def part(seed: int = 0) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(seed), "format": "wav"}}


SAID = {"type": "text", "text": TEXT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio_checkpoints.make_hearing(tmp_path_factory.mktemp("ears") / "voxtral")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_blocks=128, block_size=4) as loaded:
        yield loaded


def places(request: Request) -> tuple[tuple[int, int, bytes], ...]:
    return tuple((run.position, run.length, run.key) for run in request.runs)


def test_every_shape_makes_the_same_prompt(llm: LLM, http: TestClient, submitted: list[Request]) -> None:
    shapes = [part(), {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded()}"}}]
    answers = set()
    for shape in shapes:
        asked = {"messages": [{"role": "user", "content": [shape, SAID]}], **GREEDY}
        answers.add(http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"])
    items = [part(), {"type": "input_text", "text": TEXT}]
    asked = {"input": [{"role": "user", "content": items}], "temperature": 0.0, "max_output_tokens": 6}
    answers.add(http.post("/v1/responses", json=asked).json()["output"][0]["content"][0]["text"])
    values: list[Any] = [wav(), noise(), (noise(), audio_checkpoints.RATE), f"data:audio/wav;base64,{encoded()}"]
    for value in values:
        output = llm.chat([{"role": "user", "content": [{"type": "audio", "audio": value}, SAID]}], **GREEDY)[0]
        assert output.outputs[0].message is not None
        answers.add(output.outputs[0].message.content)
    assert len(answers) == 1 and len(submitted) == 7
    assert {request.prompt for request in submitted} == {submitted[0].prompt}
    for mine in (submitted[:3], submitted[3:]):  # keys are a tenant's
        assert {places(request) for request in mine} == {places(mine[0])}
    assert [run.length for run in submitted[0].runs] == [2 * audio_checkpoints.ROWS]


def test_prompts_take_them_beside(llm: LLM, submitted: list[Request], tmp_path: Path) -> None:
    (tmp_path / "it.wav").write_bytes(wav())
    values: list[Any] = [
        str(tmp_path / "it.wav"),
        [wav()],
        (noise(), audio_checkpoints.RATE),
        [(noise(), audio_checkpoints.RATE)],
    ]
    texts = {
        llm.generate({"prompt": f"[AUDIO]{TEXT}", "multi_modal_data": {"audio": value}}, **GREEDY)[0].outputs[0].text
        for value in values
    }
    assert len(texts) == 1 and len({places(request) for request in submitted}) == 1
    two = {"prompt": "[AUDIO] and [AUDIO]", "multi_modal_data": {"audio": [wav(), wav(1)]}}
    assert llm.generate(two, **GREEDY)[0].outputs[0].text
    assert len({run.key for run in submitted[-1].runs}) == 2
    with pytest.raises(InvalidRequest, match=r"placeholders for 1 sounds, each '\[AUDIO\]', but 2 were sent"):
        llm.generate({**two, "prompt": "[AUDIO]"}, **GREEDY)
    with pytest.raises(UnsupportedFeature, match="reads only text and sounds; no images can be sent to it"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": b"x"}}, **GREEDY)


def test_what_is_said_again_is_found(llm: LLM) -> None:
    given = {"prompt": f"again[AUDIO]{TEXT}", "multi_modal_data": {"audio": wav(7)}}
    first, again = (llm.generate(given, **GREEDY)[0] for _ in range(2))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids and (again.num_cached_tokens or 0) > 8
    other = llm.generate({**given, "multi_modal_data": {"audio": wav(8)}}, **GREEDY)[0]
    assert (other.num_cached_tokens or 0) <= 8  # `again`, and what begins a sound


def test_sounds_of_listed_hosts_are_fetched(llm: LLM, http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.model.pictures is not None
    with served_pictures() as elsewhere:
        parts = [{"type": "audio_url", "audio_url": {"url": f"http://{elsewhere}/it.png"}}, SAID]
        asked = {"messages": [{"role": "user", "content": parts}], **GREEDY}
        monkeypatch.setattr(llm.model.pictures, "hosts", ImageHosts(["example.org"]))
        assert "(sound) is at http" in http.post("/v1/chat/completions", json=asked).text
        monkeypatch.setattr(llm.model.pictures, "hosts", ImageHosts([f"http://{elsewhere}"]))
        assert "or not WAV, MP3, FLAC or Ogg" in http.post("/v1/chat/completions", json=asked).text


REFUSED: list[tuple[Any, str]] = [
    ([{"type": "image_url", "image_url": {"url": "data:,"}}], "reads only text and sounds"),
    (
        [{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/x.wav"}}],
        "the sound itself, as data:audio/",
    ),
    ([{"type": "audio", "audio": "/etc/hostname"}], "this server does not fetch"),
    ([{"type": "audio", "audio": [0.1, 0.2]}], "is list; must be bytes"),
    ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], "cannot be read: it is damaged"),
    ([part(), {"type": "text", "text": "hear [AUDIO]"}], "which is the placeholder of sounds"),
    ([part()] * 17, "17 sounds were sent; at most 16"),
]


@pytest.mark.parametrize(("parts", "why"), REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(http: TestClient, parts: Any, why: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], **GREEDY})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_apis_without_sounds_say_what_is_read(http: TestClient) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    said = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    for path, body in [
        ("/v1/messages", {"max_tokens": 4, "messages": said}),
        ("/generate", {"inputs": "![](data:image/png;base64,AAAA)"}),
    ]:
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 422) and "'voxtral' reads only text and sounds" in answer.text


def test_models_say_what_they_read(http: TestClient) -> None:
    (row,) = http.get("/v1/models").json()["data"]
    assert row["input_modalities"] == ["text", "audio"] and row["reads_pictures"] is False


async def test_lmtp_takes_them(llm: LLM) -> None:
    wanted = llm.generate({"prompt": f"[AUDIO]{TEXT}", "multi_modal_data": {"audio": wav()}}, **GREEDY)[0].outputs[0]
    setup = Setup(llm.model)
    wire = setup.connect()
    try:
        (hello,) = await wire.ask("MODEL_INFO", model=llm.model.name)
        assert hello["model_info"]["lmtp"]["audio"] is True
        asked = {"model": llm.model.name, "prompt": f"[AUDIO]{TEXT}", **GREEDY}
        found = await wire.ask("GENERATE", **asked, audio=[f"data:audio/wav;base64,{encoded()}"])
        assert [body["token"] for body in found] == list(wanted.token_ids)
        (body,) = await wire.ask("GENERATE", **asked, audio=[5])
        assert "audio[0] is a int" in body["error"]
    finally:
        await setup.server.close()


PAGE = (ROOT / "docs" / "sound-and-video.md").read_text(encoding="utf-8")


def test_the_pages_program_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "speech.wav").write_bytes(wav())
    given = {
        '"./voxtral"': repr(str(folder)),
        "UklGRg...": encoded(),
        '"speech.wav"': repr(str(tmp_path / "speech.wav")),
    }
    for name, value in given.items():
        assert name in program
        program = program.replace(name, value)
    names: dict[str, Any] = {}
    exec(compile(program, "sound-and-video.md", "exec", dont_inherit=True), names)
    names["llm"].close()
    assert len(capsys.readouterr().out.strip()) > 2


def test_the_pages_figures() -> None:
    limits = MediaLimits()
    assert (limits.max_sounds, limits.max_videos) == (16, 4) and "| 16 sounds, 4 videos |" in PAGE
    assert (limits.max_sound_seconds, limits.max_video_seconds) == (1_800, 3_600) and "| 1,800 s; 3,600 s |" in PAGE
    assert (LEAST_RATE, MOST_RATE, MOST_CHANNELS) == (1_000, 384_000, 16)
    assert "| 1,000 to 384,000 samples per second, at most 16 channels |" in PAGE
    assert MOST_FRAME_PIXELS == 10_000_000 and "| 10 million |" in PAGE
    assert (limits.max_frames, limits.max_video_pixels) == (240, 16_000_000) and "| 240; 16 million |" in PAGE
    assert limits.decode_seconds == 20 and "| 20 seconds for each sound or video |" in PAGE
    assert CHOSEN_RATE == 2 == Frames().rate and Frames().fewest == 4 and "at least 4" in PAGE
