"""Tests that OpenAI's real client sends audio and video to served models, whole and streamed. Audio is sent as in
OpenAI's documentation, video as in vLLM's."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from openai.types.responses import ResponseInputAudioParam
from PIL import Image

from bridle.config import ModelConfig
from bridle.serving import load_model
from bridle.serving.controller_runtime import ControlSettings
from tests.fakes import audio_checkpoints, vision_checkpoints
from tests.http.harness import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HEARD, SEEN = "What is in this recording?", "What happens?"


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Yield a client of a model that takes audio."""
    folder = audio_checkpoints.make_hearing(tmp_path_factory.mktemp("ears") / "ears")
    with served(load_model(_config(folder), control=ControlSettings("off"))) as url, _client(url) as client:
        yield client


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Yield a client of a model that takes video."""
    folder = vision_checkpoints.make_seeing("qwen3_vl", tmp_path_factory.mktemp("eyes") / "eyes")
    with served(load_model(_config(folder), control=ControlSettings("off"))) as url, _client(url) as client:
        yield client


def _config(folder: Any) -> ModelConfig:
    return ModelConfig(str(folder), num_blocks=128, block_size=4)


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


#: Two tones, in hertz: noise of any seed sounds alike.
LOW, HIGH = 440, 3_000


def wav(hertz: int) -> str:
    """Return a tone as a 16-bit WAV file in base64."""
    file = io.BytesIO()
    tone = 0.3 * np.sin(2 * np.pi * hertz / audio_checkpoints.RATE * np.arange(5_000))
    soundfile.write(file, tone, audio_checkpoints.RATE, format="WAV", subtype="PCM_16")
    return base64.b64encode(file.getvalue()).decode("utf-8")


def spoken(data: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def moving(seed: int, count: int = 4) -> str:
    """Return a video of a few frames as a `data:` URL."""
    numbers = np.random.RandomState(seed).randint(0, 255, (count, 24, 30, 3), dtype=np.uint8)
    first, *rest = (Image.fromarray(frame) for frame in numbers)
    file = io.BytesIO()
    first.save(file, "WEBP", save_all=True, append_images=rest, duration=500, lossless=True)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode('utf-8')}"


def asked(part: dict[str, Any], text: str, **more: Any) -> Any:
    turn = {"role": "user", "content": [{"type": "text", "text": text}, part]}
    return {"messages": [turn], "max_tokens": 8, "temperature": 0.0, **more}


def check_chats(client: openai.OpenAI, model: str, text: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Check that the answer to the first part is the same whole and streamed, and differs from the answer to the second
    part. Return the answer."""
    chat = client.chat.completions
    answers = [chat.create(model=model, **asked(part, text)) for part in (first, second)]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] != texts[1]
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens > 16
    chunks = list(chat.create(model=model, **asked(first, text, stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == texts[0]
    assert chunks[-1].usage.prompt_tokens == answers[0].usage.prompt_tokens
    return str(texts[0])


def test_sounds_in_chats(ears: openai.OpenAI) -> None:
    first, second = wav(LOW), wav(HIGH)
    text = check_chats(ears, "ears", HEARD, spoken(first), spoken(second))
    addresses = [
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}} for data in (first, second)
    ]
    assert check_chats(ears, "ears", HEARD, *addresses) == text
    with ears.chat.completions.stream(model="ears", **asked(spoken(first), HEARD)) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == text


async def test_sounds_on_an_event_loop(ears: openai.OpenAI) -> None:
    text = ears.chat.completions.create(model="ears", **asked(spoken(wav(LOW)), HEARD)).choices[0].message.content
    async with openai.AsyncOpenAI(base_url=ears.base_url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="ears", **asked(spoken(wav(LOW)), HEARD, stream=True))
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text != ""


def test_sounds_in_responses(ears: openai.OpenAI) -> None:
    def respond(data: str, **more: Any) -> Any:
        sound = ResponseInputAudioParam(type="input_audio", input_audio={"data": data, "format": "wav"})
        parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": HEARD}, sound]}]
        return ears.responses.create(model="ears", input=parts, max_output_tokens=16, temperature=0.0, **more)

    first, second = (respond(wav(hertz)) for hertz in (LOW, HIGH))
    assert first.output_text != second.output_text
    events = list(respond(wav(LOW), stream=True))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == first.output_text
    chat = ears.chat.completions.create(model="ears", **asked(spoken(wav(LOW)), HEARD, max_tokens=16))
    assert chat.choices[0].message.content == said


def test_videos_in_chats(eyes: openai.OpenAI) -> None:
    first, second = ({"type": "video_url", "video_url": {"url": moving(seed)}} for seed in (1, 2))
    check_chats(eyes, "eyes", SEEN, first, second)


def test_what_a_model_does_not_read_is_refused(ears: openai.OpenAI, eyes: openai.OpenAI) -> None:
    """A server says which input its model takes, and refuses all other input and invalid base64."""
    models = [client.models.retrieve(name).model_dump() for client, name in ((ears, "ears"), (eyes, "eyes"))]
    assert [model["input_modalities"] for model in models] == [["text", "audio"], ["text", "image", "video"]]
    with pytest.raises(openai.BadRequestError, match="reads only text, images and videos"):
        eyes.chat.completions.create(model="eyes", **asked(spoken(wav(LOW)), HEARD))
    with pytest.raises(openai.BadRequestError, match="base64"):
        ears.chat.completions.create(model="ears", **asked(spoken("no base64"), HEARD))
