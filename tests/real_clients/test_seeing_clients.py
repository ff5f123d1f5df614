"""Tests that real clients send images to a served model as their documentation shows, whole and streamed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from bridle.config import ModelConfig
from bridle.serving import load_model
from bridle.serving.controller_runtime import ControlSettings
from tests.fakes import vision_checkpoints
from tests.http.harness import served
from tests.multimodal.picture_server import png, served_pictures
from tests.real_clients.environment import foreign_python, run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
QUESTION = "What is in this image?"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """Serve images on another port; yield the URL."""
    with served_pictures() as place:
        yield f"http://{place}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, elsewhere: str) -> Iterator[str]:
    folder = vision_checkpoints.make_seeing("qwen2_vl", tmp_path_factory.mktemp("eyes") / "eyes")
    config = ModelConfig(str(folder), num_blocks=128, block_size=4, image_hosts=(elsewhere,))
    with served(load_model(config, control=ControlSettings("off"))) as url:
        yield url


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write two images of one size; return their paths."""
    folder = tmp_path_factory.mktemp("pictures")
    for seed in range(2):
        numbers = np.random.RandomState(seed).randint(0, 255, (24, 30, 3), dtype=np.uint8)
        Image.fromarray(numbers).save(folder / f"{seed}.png")
    return [folder / "0.png", folder / "1.png"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the image that the other server has to a file; return its path."""
    file = tmp_path_factory.mktemp("drawn") / "it.png"
    file.write_bytes(png())
    return file


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode("utf-8")


def test_openais_client(server: str, files: list[Path]) -> None:
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:

        def chat(file: Path, **more: Any) -> Any:
            image = {"url": f"data:image/png;base64,{encoded(file)}", "detail": "high"}
            content = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": image}]
            turn: Any = [{"role": "user", "content": content}]
            return client.chat.completions.create(model="eyes", messages=turn, max_tokens=8, temperature=0.0, **more)

        first, second = (chat(file) for file in files)
        assert first.choices[0].message.content != second.choices[0].message.content
        assert first.usage.prompt_tokens == second.usage.prompt_tokens
        chunks = list(chat(files[0], stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == first.choices[0].message.content
        assert chunks[-1].usage.prompt_tokens == first.usage.prompt_tokens
        bad: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/x"}}]}]
        with pytest.raises(openai.BadRequestError, match="may not fetch from that host"):
            client.chat.completions.create(model="eyes", messages=bad)


async def test_openais_helpers(server: str, files: list[Path]) -> None:
    """OpenAI's helpers for streams and its asyncio client give equal answers to a prompt with an image."""
    url = f"data:image/png;base64,{encoded(files[0])}"
    parts: Any = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    asked: Any = {
        "model": "eyes",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 8,
        "temperature": 0.0,
    }
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(**asked) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
        items: Any = [
            {"type": "input_text", "text": QUESTION},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ]
        given: Any = [{"role": "user", "content": items}]
        with client.responses.stream(model="eyes", input=given, max_output_tokens=16, temperature=0.0) as response:
            said = "".join(event.delta for event in response if event.type == "response.output_text.delta")
        assert text and said.startswith(text)
    async with openai.AsyncOpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert answer.choices[0].message.content == text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


def test_addresses_of_pictures(server: str, elsewhere: str, drawn: Path) -> None:
    """An image's URL, as in the clients' documentation, gets the same answer as the image's data."""
    address, data = f"{elsewhere}/it.png", f"data:image/png;base64,{encoded(drawn)}"
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:
        texts = set()
        for url in (address, data):
            content = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
            turn: Any = [{"role": "user", "content": content}]
            chunks = client.chat.completions.create(
                model="eyes", messages=turn, max_tokens=8, temperature=0.0, stream=True
            )
            texts.add("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
        assert len(texts) == 1 and texts != {""}
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as claude:
        answers = []
        for source in (
            {"type": "url", "url": address},
            {"type": "base64", "media_type": "image/png", "data": encoded(drawn)},
        ):
            blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
            said: Any = [{"role": "user", "content": blocks}]
            with claude.messages.stream(
                model="eyes", max_tokens=8, messages=said, extra_body={"temperature": 0.0}
            ) as stream:
                answers.append("".join(stream.text_stream))
        assert answers[0] == answers[1] != ""


def test_openais_responses(server: str, files: list[Path]) -> None:
    with openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:

        def respond(file: Path, **more: Any) -> Any:
            parts = [
                {"type": "input_text", "text": QUESTION},
                {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(file)}"},
            ]
            asked: Any = [{"role": "user", "content": parts}]
            return client.responses.create(model="eyes", input=asked, max_output_tokens=16, temperature=0.0, **more)

        first, second = (respond(file) for file in files)
        assert first.output_text != second.output_text
        events = list(respond(files[0], stream=True))
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta") == first.output_text
        )


def test_anthropics_client(server: str, files: list[Path]) -> None:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:

        def asked(file: Path) -> Any:
            source = {"type": "base64", "media_type": "image/png", "data": encoded(file)}
            content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
            turn = [{"role": "user", "content": content}]
            return {"model": "eyes", "max_tokens": 8, "messages": turn, "extra_body": {"temperature": 0.0}}

        first, second = (client.messages.create(**asked(file)) for file in files)
        block, other = first.content[0], second.content[0]
        assert block.type == other.type == "text" and block.text != other.text
        assert first.usage.input_tokens == second.usage.input_tokens
        with client.messages.stream(**asked(files[0])) as stream:
            assert "".join(stream.text_stream) == block.text


async def test_anthropics_tools_and_counts(server: str, files: list[Path]) -> None:
    """Anthropic's client sends an image as a tool's result, counts the prompt's tokens, and reads the events of a
    stream."""
    source = {"type": "base64", "media_type": "image/png", "data": encoded(files[0])}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}
    said: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    asked: Any = {"model": "eyes", "max_tokens": 8, "messages": said, "extra_body": {"temperature": 0.0}}
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        message = client.messages.create(**asked)
        usage, counted = message.usage, client.messages.count_tokens(model="eyes", messages=said)
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens > 16
    async with anthropic.AsyncAnthropic(base_url=server, api_key="none", max_retries=0) as client:
        events = [event async for event in await client.messages.create(**asked, stream=True)]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    (block,) = message.content
    assert block.type == "text" and block.text == text


def test_huggingfaces_client(server: str, files: list[Path]) -> None:
    script = HERE / "script_seeing.py"
    python = foreign_python("text-generation==0.7.0", "huggingface_hub==0.36.2")
    printed = run_script(python, script, server, *map(str, files))
    assert printed.count(" ok\n") == script.read_text().count("\ndef check_") == 5
