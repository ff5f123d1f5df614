"""A scripted model with a real control runtime behind a real server, and functions that read its streams."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.config import EngineConfig
from bridle.controllers.composite_pool import with_composed
from bridle.controllers.pool import PythonControllerPool
from bridle.engine import AsyncEngine, Engine
from bridle.serving import LoadedModel
from bridle.structured_output import vocabulary_of
from bridle.testing.scripted import ScriptedExecutor
from bridle.tokenizer import Detokenizer, Tokenizer
from tests.aici.guests import guest2, sample
from tests.fakes.compile_children import thrifty_pool
from tests.http.harness import NAME, tokenizer, tokenizer_folder
from tests.waiting import PATIENCE

VOCAB_SIZE = tokenizer().vocab_size


def ids(text: str) -> list[int]:
    """Return token ids of a text, without special tokens."""
    return tokenizer().encode(text, add_special_tokens=False)


def pick(text: str) -> list[str]:
    """Return a controller step that samples one of the tokens of a text."""
    return sample(ids(text), VOCAB_SIZE)


#: Samples `x` for ever.
ENDLESS = guest2([pick("x")])


@contextlib.contextmanager
def controlled_model(
    store: Path,
    *args: str,
    next_token: Callable[[Any], Any] | None = None,
    max_model_len: int = 512,
    folder: Path | None = None,
) -> Iterator[LoadedModel]:
    """Yield a scripted model whose runtime keeps modules in the folder `store`. `folder` may have a tokenizer. The
    model and its processes are closed at the end."""
    text = tokenizer() if folder is None else Tokenizer.load(folder)
    executor = ScriptedExecutor(
        vocab_size=text.vocab_size,
        num_blocks=max_model_len // 2,
        block_size=16,
        max_model_len=max_model_len,
        eos_token_ids=text.eos_token_ids,
        next_token=next_token,
    )
    limits = ("--wasm-max-step-time", "500", "--limit", "max_prepare_wait=600000", "--store", str(store))
    config = RuntimeConfig(str(folder or tokenizer_folder()), num_logits=text.vocab_size, extra_args=(*limits, *args))
    pool = RuntimePool(config, text.vocab_size)
    constraints = thrifty_pool(lambda: vocabulary_of(text, text.vocab_size, text.eos_token_ids))
    pools = with_composed([pool, PythonControllerPool(text.vocab_size), constraints], text.vocab_size)
    engine = Engine(executor, EngineConfig(step_timeout=5.0), pools=pools, decoder=Detokenizer(text))
    client = AsyncEngine(engine)
    pool.wake = client.wake
    client.start()
    model = LoadedModel(NAME, client, text, constraints=constraints, control=pool, shutdown=client.close)
    try:
        yield model
    finally:
        model.close()


def lent(model: LoadedModel) -> LoadedModel:
    """Return the model in a form that the server uses but does not close."""
    return replace(model, shutdown=lambda drain: None)


class Client:
    """A client of the AICI routes."""

    def __init__(self, url: str, **headers: str) -> None:
        self.http = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE)

    def upload(self, wasm: bytes) -> str:
        answer = self.http.post("/v1/controllers", content=wasm)
        answer.raise_for_status()
        return str(answer.json()["module_id"])

    def tag(self, module: str, *tags: str) -> httpx.Response:
        return self.http.post("/v1/controllers/tags", json={"module_id": module, "tags": list(tags)})

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def run(self, controller: str | bytes, argument: Any = "", **body: Any) -> list[Any]:
        """Return the items of a run's stream, including `[DONE]`."""
        name = self.upload(controller) if isinstance(controller, bytes) else controller
        return self.stream("/v1/run", controller=name, controller_arg=argument, **body)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the items of any route's stream."""
        with self.http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                answer.read()
            answer.raise_for_status()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return list(events_of(answer.iter_lines()))

    def close(self) -> None:
        self.http.close()


def events_of(lines: Iterator[str]) -> Iterator[Any]:
    """Yield the payloads of server-sent events; `[DONE]` stays a text."""
    for line in lines:
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)


def text_of(items: Sequence[Any], index: int = 0) -> str:
    """Return all text of one fork of a run."""
    return joined(items, "text", index)


def joined(items: Sequence[Any], key: str, index: int = 0) -> str:
    """Return a text field of one fork, joined over all `run` items."""
    return "".join(fork[key] for item in runs_of(items) for fork in item["forks"] if fork["index"] == index)


def runs_of(items: Sequence[Any]) -> list[Any]:
    """Return the `run` items of a stream."""
    return [item for item in items if isinstance(item, dict) and item["object"] == "run"]


def last_fork(items: Sequence[Any], index: int = 0) -> Any:
    """Return the last item's data of one fork."""
    return next(fork for fork in runs_of(items)[-1]["forks"] if fork["index"] == index)
