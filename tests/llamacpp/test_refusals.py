"""Tests that requests for features that llama.cpp's backend lacks are refused over HTTP before anything is computed.
Each API gives a message and its own status, and the server keeps running."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("llama_cpp")

from websockets.sync.client import connect

from bridle import LLM
from bridle.cli import main
from bridle.config import EngineConfig, ModelConfig
from bridle.errors import BridleError
from bridle.llamacpp.executor import LlamaExecutor
from bridle.lmtp.server import websocket_front
from bridle.serving import AdapterSet, ModelRegistry
from bridle.serving.lora.lora_config import AdapterCatalog
from bridle.serving.models.loading import load_model
from tests.gguf.kit import pair
from tests.http.harness import serving
from tests.lora.kit import write_adapter
from tests.waiting import PATIENCE

Body = dict[str, Any]


def _png(path: Path) -> Path:
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _png(tmp_path_factory.mktemp("pictures") / "it.png")


@pytest.fixture(scope="module")
def steps() -> Iterator[list[int]]:
    """Yield a list that receives the number of each step that the backend runs."""
    seen: list[int] = []
    forward = LlamaExecutor.forward

    def counted(self: LlamaExecutor, plan: Any) -> None:
        seen.append(plan.step)
        forward(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaExecutor, "forward", counted)
        yield seen


@pytest.fixture(scope="module")
def server(steps: list[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a model on llama.cpp, with LMTP on the same port and a folder of adapters."""
    adapters = tmp_path_factory.mktemp("adapters")
    write_adapter(adapters / "fits")
    write_adapter(adapters / "head", {"lm_head": _head()}, targets=("lm_head",))
    config = ModelConfig(str(pair("llama")[1]), num_blocks=64, backend="llamacpp", dtype="float32", num_threads=1)
    registry = ModelRegistry(adapters=AdapterCatalog(AdapterSet(folder=adapters)))
    registry.add(load_model(config, EngineConfig(), name="m"))
    with serving(registry, fronts=[websocket_front()]) as url:
        yield url


def _head() -> Any:
    from bridle.lora import LayerShape

    return LayerShape(32, 300)


# -- the table --------------------------------------------------------------------------------------------------------

_PIXEL = base64.b64encode(b"a picture that nobody opens").decode()
_URL = f"data:image/png;base64,{_PIXEL}"
_SOUND = {"data": _PIXEL, "format": "wav"}


def _turn(*parts: Body) -> list[Body]:
    return [{"role": "user", "content": [*parts]}]


def _chat(part: Body) -> Body:
    return {"messages": _turn({"type": "text", "text": "What is it?"}, part), "max_tokens": 4}


_IMAGE_OF_ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": _PIXEL},
}
_ONLY_TEXT = "'m' reads only text"
_LONG = "the " * 600
_MOST = "512 tokens"

#: Route, body, status, words.
REFUSED: list[tuple[str, Body, int, str]] = [
    # pictures, sounds, videos
    ("/v1/chat/completions", _chat({"type": "image_url", "image_url": {"url": _URL}}), 400, _ONLY_TEXT),
    ("/v1/chat/completions", _chat({"type": "input_audio", "input_audio": _SOUND}), 400, _ONLY_TEXT),
    ("/v1/chat/completions", _chat({"type": "video_url", "video_url": {"url": "data:,x"}}), 400, _ONLY_TEXT),
    ("/v1/completions", {"prompt": "a", "image_data": [{"data": _PIXEL, "id": 1}]}, 400, "image_data is not supported"),
    ("/v1/responses", {"input": _turn({"type": "input_image", "image_url": _URL})}, 400, _ONLY_TEXT),
    ("/v1/messages", _chat(_IMAGE_OF_ANTHROPIC), 400, _ONLY_TEXT),
    ("/v1/messages/count_tokens", _chat(_IMAGE_OF_ANTHROPIC), 400, _ONLY_TEXT),
    ("/generate", {"inputs": f"What is it? ![]({_URL})"}, 422, _ONLY_TEXT),
    ("/generate_stream", {"inputs": f"What is it? ![]({_URL})"}, 422, _ONLY_TEXT),
    ("/generate", {"text": "a", "image_data": _URL}, 400, "image_data is not supported"),
    ("/generate", {"text": "a", "audio_data": "data:,x"}, 400, "audio_data is not supported"),
    ("/v1/run", {"prompt": "a", "controller": "x", "controller_arg": "{}"}, 501, "without a control runtime"),
    # vectors and labels that it has not
    ("/v1/embeddings", {"input": "a", "dimensions": 99}, 400, "must be from 1 to 32"),
    ("/v1/classify", {"input": "a"}, 400, "'m' generates text"),
    ("/predict", {"inputs": "a"}, 422, "'m' generates text"),
    # adapters that it has not
    ("/v1/chat/completions", {"messages": _turn(), "adapter": "no"}, 404, "no adapter 'no'"),
    ("/v1/completions", {"prompt": "a", "adapter": "no"}, 404, "no adapter 'no'"),
    ("/v1/responses", {"input": "a", "adapter": "no"}, 404, "no adapter 'no'"),
    ("/v1/messages", {"messages": _turn(), "max_tokens": 4, "adapter": "no"}, 404, "no adapter 'no'"),
    ("/generate", {"inputs": "a", "parameters": {"adapter_id": "no"}}, 404, "no adapter 'no'"),
    ("/generate", {"text": "a", "lora_path": "no"}, 404, "no adapter 'no'"),
    ("/v1/embeddings", {"input": "a", "adapter": "no"}, 404, "no adapter 'no'"),
    # texts that its cells do not hold
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": _LONG}]}, 400, _MOST),
    ("/v1/completions", {"prompt": _LONG}, 400, _MOST),
    ("/v1/responses", {"input": _LONG}, 400, _MOST),
    ("/v1/messages", {"messages": [{"role": "user", "content": _LONG}], "max_tokens": 4}, 400, _MOST),
    ("/generate", {"inputs": _LONG, "parameters": {"max_new_tokens": 4}}, 422, "512"),
    ("/generate", {"text": _LONG}, 400, _MOST),
    ("/v1/embeddings", {"input": _LONG}, 400, _MOST),
    # ids that its vocabulary has not, and more outputs than may run
    ("/v1/completions", {"prompt": [1, 300]}, 400, "prompt holds token 300"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"300": 1}}, 400, "token 300"),
    ("/generate", {"input_ids": [1, 300]}, 400, "token 300"),
    ("/v1/completions", {"prompt": "a", "n": 129}, 400, "n is 129"),
]


def _alive(url: str, route: str = "/v1/completions") -> None:
    answer = httpx.post(url + route, json={"prompt": "the", "max_tokens": 2}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("route", "body", "status", "words"), REFUSED)
def test_a_refusal_computes_nothing(
    server: str, steps: list[int], route: str, body: Body, status: int, words: str
) -> None:
    before = len(steps)
    answer = httpx.post(server + route, json={"model": "m", **body}, timeout=PATIENCE)
    assert answer.status_code == status, answer.text
    said = answer.json()
    error = said["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    if route.startswith("/v1/messages"):
        assert said["type"] == "error"
    assert len(steps) == before
    _alive(server)
    assert len(steps) > before


def test_lmtp_refuses_in_its_own_words(server: str, steps: list[int]) -> None:
    before = len(steps)
    wrong: list[tuple[str, Body, str]] = [
        ("GENERATE", {"prompt": [5, 6], "adapter": "no"}, "no adapter 'no'"),
        ("GENERATE", {"prompt": [5, 300]}, "300"),
        ("GENERATE", {"prompt": [5] * 600}, "512"),
        ("SCORE", {"prompt": [5, 300], "scored": [7]}, "300"),
    ]
    with connect(server.replace("http", "ws"), open_timeout=PATIENCE) as socket:
        for number, (kind, fields, words) in enumerate(wrong):
            socket.send(f"{kind} {json.dumps({'model': 'm', 'stream_id': number, **fields})}")
            told = json.loads(str(socket.recv(PATIENCE)).partition(" ")[2])
            assert told[0]["stream_id"] == number and words in told[0]["error"], told
        assert len(steps) == before
        socket.send('GENERATE {"model": "m", "prompt": [5, 6], "stream_id": 9, "max_tokens": 2}')
        assert "token" in json.loads(str(socket.recv(PATIENCE)).partition(" ")[2])[0]


def test_adapters_that_it_cannot_apply_are_refused_when_they_come(server: str, steps: list[int]) -> None:
    before = len(steps)
    answer = httpx.post(
        f"{server}/v1/load_lora_adapter", json={"lora_name": "head", "lora_path": "head"}, timeout=PATIENCE
    )
    assert answer.status_code == 400
    assert "'lm_head'; it may change only linear layers" in answer.json()["error"]["message"]
    missing = httpx.post(f"{server}/v1/completions", json={"model": "head", "prompt": "a"}, timeout=PATIENCE)
    assert missing.status_code == 400 and "lm_head" in missing.json()["error"]["message"]
    assert len(steps) == before
    fitting = {"lora_name": "fits", "lora_path": "fits"}
    assert httpx.post(f"{server}/v1/load_lora_adapter", json=fitting, timeout=PATIENCE).status_code == 200
    answer = httpx.post(
        f"{server}/v1/completions", json={"model": "fits", "prompt": "a", "max_tokens": 2}, timeout=PATIENCE
    )
    assert answer.status_code == 200 and answer.json()["model"] == "fits"


# -- settings ---------------------------------------------------------------------------------------------------------

SETTINGS = [
    (["--quantization", "int8"], {"quantization": "int8"}, "takes no quantization, got 'int8'"),
    (["--adapter-kernel", "torch"], {"adapter_kernel": "torch"}, "does not support adapter_kernel, got 'torch'"),
    (["--kv-cache-dtype", "int8"], {"kv_cache_dtype": "int8"}, "does not support kv_cache_dtype, got 'int8'"),
    (["--draft-model", "demo"], {"draft_model": "demo"}, "takes no draft_model"),
    (["--device", "cuda:1"], {"device": "cuda:1"}, "device is 'cuda:1'"),
]


@pytest.mark.parametrize(("flags", "fields", "words"), SETTINGS)
def test_settings_are_refused_before_a_model_is_looked_for(
    flags: list[str],
    fields: Body,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command line and `LLM` refuse a setting with the same words, before they look for the model."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model was looked for")

    for place in ("resolve_model", "hub_lookup.resolve_model", "memory_estimate.folder_of"):
        monkeypatch.setattr(f"bridle.model.{place}", never)
    for verb in (["generate", "owner/model", "x"], ["serve", "owner/model", "--port", "0"]):
        assert main([*verb, "--backend", "llamacpp", *flags]) == 2
        assert words in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(BridleError, match=words):
        LLM("owner/model", backend="llamacpp", **fields)


def test_the_command_line_and_python_show_it_no_pictures(picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(pair("llama")[1])
    for verb in (["generate", file, "x"], ["chat", file]):
        assert main([*verb, "--backend", "llamacpp", "--image", str(picture)]) == 2
        assert "reads only text" in capsys.readouterr().err.replace("\n", " ")
    with LLM(file, backend="llamacpp", num_blocks=64, num_threads=1) as llm:
        with pytest.raises(BridleError, match="reads only text"):
            llm.generate({"prompt": "x", "multi_modal_data": {"image": Image.open(picture)}})
        assert len(llm.generate("x")[0].outputs) == 1
