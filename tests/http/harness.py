"""A real server in a thread, with a real engine and tokenizer and a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from bridle.aici.client import RuntimePool
from bridle.config import EngineConfig
from bridle.controller_tools import ToolExecutor
from bridle.controllers import PythonControllerPool
from bridle.controllers.beams import BeamPool
from bridle.controllers.composite_pool import with_composed
from bridle.engine import AsyncEngine, Engine
from bridle.engine.request import Request
from bridle.http import HttpSettings, ServeSettings, create_app
from bridle.http.server.listening import bind
from bridle.http.server.run import uvicorn_config
from bridle.http.server.websocket_frontend import SocketFrontMaker
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel, ModelRegistry
from bridle.serving.lifecycle.request_record import Tracing
from bridle.serving.tenancy.keys import KeyStore
from bridle.structured_output import vocabulary_of
from bridle.testing.scripted import ScriptedExecutor
from bridle.tokenizer import Detokenizer, Tokenizer
from tests.fakes.compile_children import thrifty_pool
from tests.fakes.tiny_checkpoints import save_tokenizer
from tests.leftovers import kept_folder
from tests.waiting import PATIENCE

NAME = "scripted"

_MANY_NAPS = 200
_naps: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()


async def _nap(seconds: float) -> None:
    """Sleep shorter in a server that is young. Most servers of tests end soon, and looking often is costly for those
    that live long."""
    task = asyncio.current_task()
    assert task is not None
    _naps[task] = naps = _naps.get(task, 0) + 1
    await asyncio.sleep(seconds / 20 if naps < _MANY_NAPS else seconds)


# Servers look every tenth of a second whether they shall end, and rest as long when they do.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": _nap})


@cache
def tokenizer_folder() -> Path:
    """Return a folder with a small byte-level BPE tokenizer and a chat template."""
    folder = kept_folder("bridle-http-tests-")
    save_tokenizer(folder)
    return folder


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer of `tokenizer_folder`."""
    return Tokenizer.load(tokenizer_folder())


def scripted_model(
    *,
    next_token: Callable[[Any], Any] | None = None,
    max_model_len: int = 512,
    name: str = NAME,
    text: Tokenizer | None = None,
    config: EngineConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
    tools: ToolExecutor | None = None,
    runtime: RuntimePool | None = None,
    num_blocks: int = 256,
    **options: Any,
) -> LoadedModel:
    """Return a model whose running engine has a scripted executor. `next_token(prefix)`, or else a seeded hash, chooses
    each token. `clock` is the engine's clock. `runtime` runs the Wasm controllers, and is closed with the model."""
    text = text or tokenizer()
    executor = ScriptedExecutor(
        vocab_size=text.vocab_size,
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=max_model_len,
        eos_token_ids=text.eos_token_ids,
        next_token=next_token,
        **options,
    )
    constraints = thrifty_pool(lambda: vocabulary_of(text, text.vocab_size, text.eos_token_ids))
    python = PythonControllerPool(text.vocab_size, tools, partial(text.encode, add_special_tokens=False))
    own = [] if runtime is None else [runtime]
    pools = with_composed([python, BeamPool(), constraints, *own], text.vocab_size)
    config = config or EngineConfig()
    engine = Engine(executor, config, pools=pools, decoder=Detokenizer(text), clock=clock)
    client = AsyncEngine(engine)
    if tools is not None:
        tools.watch(client.wake)
    if runtime is not None:
        runtime.wake = client.wake
    client.start()
    beside: dict[str, Any] = {"constraints": constraints, "control": runtime, "tools": tools}
    return LoadedModel(name, client, text, engine=config, shutdown=client.close, **beside)


def overdue_model(is_read: threading.Event, **options: Any) -> LoadedModel:
    """Return a model that writes three tokens and does not end. After the client has read these tokens, all deadlines
    have passed."""
    late = 0.0

    def next_token(prefix: Any) -> int:
        nonlocal late
        if len(prefix) - num_prompt == 3:
            assert is_read.wait(PATIENCE)
            late = 1e9
        return 70  # a letter: a token without text is no event

    num_prompt = options.pop("num_prompt")
    return scripted_model(next_token=next_token, clock=lambda: time.monotonic() + late, **options)


def leisurely_model(**options: Any) -> LoadedModel:
    """Return a model that repeats one letter on a slow device, so that a request still runs when a slow reader has read
    its output."""

    def next_token(prefix: Any) -> int:
        time.sleep(0.02)
        return 70

    return scripted_model(next_token=next_token, **options)


def saying(reply: str, text: Tokenizer | None = None) -> Callable[[Any], int]:
    """Return a script that says `reply` after any prompt, then ends. The prompt must not end in a part of the reply."""
    text = text or tokenizer()
    tokens = text.encode(reply, add_special_tokens=False)

    def next_token(prefix: Any) -> int:
        prefix = list(prefix)
        for done in range(len(tokens), 0, -1):
            if prefix[-done:] == tokens[:done]:
                return tokens[done] if done < len(tokens) else text.eos_token_ids[0]
        return tokens[0]

    return next_token


@contextlib.contextmanager
def local_client(model: LoadedModel, settings: HttpSettings | None = None, **options: Any) -> Iterator[TestClient]:
    """Yield a client of an application in this process. Unexpected errors become status 500, as in a real server."""
    registry = ModelRegistry()
    registry.add(model, options.pop("aliases", ()))
    with TestClient(create_app(registry, settings), raise_server_exceptions=False) as client:
        client.headers["content-type"] = "application/json"
        yield client
    registry.close()


@contextlib.contextmanager
def served(
    model: LoadedModel,
    settings: HttpSettings | None = None,
    keys: KeyStore | None = None,
    fronts: Iterable[SocketFrontMaker] = (),
    tracing: Tracing | None = None,
    max_connections: int = 4096,
) -> Iterator[str]:
    """Yield the base URL of a server on a free port of the loopback interface."""
    with serving(ModelRegistry([model]), settings, keys, fronts, tracing, max_connections) as url:
        yield url


@contextlib.contextmanager
def serving(
    registry: ModelRegistry,
    settings: HttpSettings | None = None,
    keys: KeyStore | None = None,
    fronts: Iterable[SocketFrontMaker] = (),
    tracing: Tracing | None = None,
    max_connections: int = 4096,
) -> Iterator[str]:
    """Yield the base URL of a server for a model registry, which is closed at the end."""
    app = create_app(registry, settings, keys, fronts, tracing)
    listener = bind("127.0.0.1", 0)
    listener.listen(128)
    limits: Any = {"max_header_bytes": 16_384, "max_connections": max_connections}
    config = uvicorn_config(app, ServeSettings(http=settings or HttpSettings(), **limits))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        # The socket listens already, so this waits for the server without a loop.
        httpx.get(url + "/health/live", timeout=PATIENCE).raise_for_status()
        yield url
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        registry.close()
        assert not thread.is_alive()


def without_template(folder: Path) -> Tokenizer:
    save_tokenizer(folder)
    for path in (folder / "chat_template.jinja", folder / "chat_template.json"):
        path.unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


RECOMMENDED: Mapping[str, Any] = {
    "temperature": 0.625, "top_p": 0.75, "top_k": 9, "min_p": 0.125, "typical_p": 0.875, "repetition_penalty": 1.25,
}  # fmt: skip


class Heard:
    """A record of the requests that reach a model's engine."""

    def __init__(self, model: LoadedModel) -> None:
        self.requests: list[Request] = []
        submit = model.client.submit

        def listen(request: Request, *more: Any) -> Any:
            self.requests.append(request)
            return submit(request, *more)

        model.client.submit = listen  # type: ignore[method-assign]

    def last(self) -> dict[str, Any]:
        return recommended(self.requests[-1].sampling)


def recommended(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in RECOMMENDED}


def every_route(app: FastAPI) -> Iterator[Any]:
    """Yield all routes of the application, including undocumented routes and those of included routers."""
    for entry in app.routes:
        router = getattr(entry, "original_router", None)
        yield from [entry] if router is None else router.routes


def calls(app: FastAPI) -> list[tuple[str, str]]:
    """Return methods and paths of all HTTP routes."""
    found = {(method, route.path) for route in every_route(app) for method in getattr(route, "methods", None) or ()}
    paths = {(method, path.replace(":path", "")) for method, path in found}
    assert paths >= documented(), "some routes were not found"
    return sorted(found)


@cache
def documented() -> set[tuple[str, str]]:
    """Return methods and paths in the description of every application, cached because it takes half a second."""
    description = create_app(ModelRegistry()).openapi()
    return {(method.upper(), path) for path, item in description["paths"].items() for method in item}


def raw_request(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Return a connection on which a request was sent, and on which the answer was not read."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection
