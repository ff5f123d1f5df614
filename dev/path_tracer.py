"""List bridle's files and functions that run for one prompt on each API, with a scripted model.

    python -m dev.path_tracer              # a table: files and functions of each API
    python -m dev.path_tracer chat         # every function that a chat passes, file by file
    python -m dev.path_tracer --calls      # what a chat calls across files, from its route to the engine

A complete server runs in this process, with sockets, threads and engine. The same request is sent a few times before
the counted request, so that one-time work (imports, caches, lazy parts) does not count. A function counts once, however
often it runs. Comprehensions count as part of their function. The scripted model replaces the torch model, so its own
functions and those that it calls are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1] / "bridle"
_LEFT_OUT = ("bridle/testing/",)
_LEFT_OUT_FILES = tuple(str(ROOT.parent / each) for each in _LEFT_OUT)
_PARTS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")
NUM_WARM_UP = 3
MAX_TOKENS = 8

Passed = dict[str, set[str]]


class Tracer:
    """Records which functions of bridle start while tracing is on, in every thread that started after `install`."""

    def __init__(self) -> None:
        self._is_on = False
        self._seen: set[CodeType] = set()
        #: Calls in the order of their first time: a function, with the nearest calling function of bridle.
        self.calls: dict[tuple[CodeType, CodeType | None], None] = {}

    def install(self) -> None:
        """Trace this thread, and threads that start from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def begin(self) -> None:
        self._seen.clear()
        self.calls.clear()
        self._is_on = True

    def end(self) -> Passed:
        """Return the files, and their functions that ran since `begin`."""
        self._is_on = False
        passed: Passed = defaultdict(set)
        for code in self._seen:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT) and code.co_name not in _PARTS:
                name = path.relative_to(ROOT.parent).as_posix()
                if not name.startswith(_LEFT_OUT):
                    passed[name].add(code.co_qualname)
        return passed

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if self._is_on and event == "call":
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(_LEFT_OUT_FILES):
                caller = caller.f_back
            if caller is None:
                self._seen.add(frame.f_code)
                self.calls.setdefault((frame.f_code, _caller_of(frame)))


def _caller_of(frame: FrameType) -> CodeType | None:
    """Return the nearest calling function of bridle in the same thread; None if an event loop or a thread made the
    call."""
    above = frame.f_back
    while above is not None and not (_is_ours(above.f_code) and above.f_code.co_name not in _PARTS):
        above = above.f_back
    return None if above is None else above.f_code


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{ROOT}/")


# -- what is asked ---------------------------------------------------------------------------------------------

_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": MAX_TOKENS}
_MESSAGES = _CHAT | {"model": "scripted"}
HTTP: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", _CHAT),
    "chat, streamed": ("/v1/chat/completions", _CHAT | {"stream": True}),
    "completions": ("/v1/completions", {"prompt": "Hello there", "max_tokens": MAX_TOKENS}),
    "responses": ("/v1/responses", {"input": "Hello there", "max_output_tokens": MAX_TOKENS}),
    "messages": ("/v1/messages", _MESSAGES),
    "generate": ("/generate", {"inputs": "Hello there", "parameters": {"max_new_tokens": MAX_TOKENS}}),
    "run": ("/v1/run", {"controller": "none", "controller_arg": "Hello there", "max_tokens": MAX_TOKENS}),
    "embeddings": ("/v1/embeddings", {"input": "Hello there"}),
}
LOCAL = ("batch file", "lmtp", "llm.generate", "llm.chat")


@contextmanager
def _model() -> Iterator[Any]:
    """Yield a model whose engine runs over a scripted executor, with a real tokenizer and chat template."""
    from bridle.config import EngineConfig
    from bridle.controllers import PythonControllerPool
    from bridle.engine import AsyncEngine, Engine
    from bridle.serving import LoadedModel
    from bridle.structured_output import ConstraintPool, vocabulary_of
    from bridle.testing.scripted import ScriptedExecutor
    from bridle.tokenizer import Detokenizer, Tokenizer
    from tests.fakes.tiny_checkpoints import save_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        text = Tokenizer.load(folder)
        size, ends = text.vocab_size, text.eos_token_ids
        executor = ScriptedExecutor(size, 256, 16, max_model_len=512, eos_token_ids=ends, embedding_size=8)
        constraints = ConstraintPool(lambda: vocabulary_of(text, size, ends))
        pools: list[Any] = [PythonControllerPool(size), constraints]
        config = EngineConfig()
        client = AsyncEngine(Engine(executor, config, pools=pools, decoder=Detokenizer(text)))
        client.start()
        model = LoadedModel("scripted", client, text, constraints=constraints, engine=config, shutdown=client.close)
        try:
            yield model
        finally:
            model.close()


async def _settle(model: Any) -> None:
    """Wait until the engine is idle, so that all work of one request is counted."""
    while model.client.statistics().num_running or model.client.statistics().num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)


async def _traced(tracer: Tracer, model: Any, ask: Callable[[], Awaitable[None]]) -> Passed:
    for _ in range(NUM_WARM_UP):
        await ask()
    await _settle(model)
    tracer.begin()
    await ask()
    await asyncio.sleep(0.05)
    return tracer.end()


# -- the ways in -----------------------------------------------------------------------------------------------


async def _trace_http(tracer: Tracer, model: Any, names: list[str], found: dict[str, Passed]) -> None:
    import uvicorn

    from bridle.http import ServeSettings, create_app
    from bridle.http.server.listening import bind
    from bridle.http.server.run import uvicorn_config
    from bridle.serving import ModelRegistry

    app = create_app(ModelRegistry([model]))
    listener = bind("127.0.0.1", 0)
    listener.listen(8)
    server = uvicorn.Server(uvicorn_config(app, ServeSettings(log_level="warning")))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    try:
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            for name in names:
                ask = partial(asyncio.to_thread, _post, connection, *HTTP[name])
                found[name] = await _traced(tracer, model, ask)
    finally:
        server.should_exit = True
        thread.join(30)


def _post(connection: HTTPConnection, path: str, body: dict[str, Any]) -> None:
    """Send one request on a connection that stays open, as clients do."""
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, answer


async def _trace_batch(tracer: Tracer, model: Any) -> Passed:
    from bridle.http import create_app
    from bridle.http.openai.batch import answer_batch, read_requests
    from bridle.serving import ModelRegistry

    app = create_app(ModelRegistry([model]))
    line = json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "method": "POST", "body": _CHAT}).encode()

    async def ask() -> None:
        async for answer in answer_batch(app, read_requests([line]), 4):
            assert answer["response"]["status_code"] == 200, answer

    return await _traced(tracer, model, ask)


async def _trace_lmtp(tracer: Tracer, model: Any) -> Passed:
    from bridle.lmtp.client import memory_pair
    from bridle.lmtp.server import LmtpServer, LocalHost
    from bridle.serving import Admission, ModelRegistry
    from bridle.serving.tenancy.keys import Identity

    server = LmtpServer(LocalHost(ModelRegistry([model]), Admission()))
    ours, theirs = memory_pair(1 << 20)
    task = asyncio.create_task(server.serve(theirs, Identity("ann", False)))
    numbers = iter(range(1, 1000))

    async def ask() -> None:
        number = next(numbers)
        asked = {"model": "scripted", "prompt": "Hello there", "max_tokens": MAX_TOKENS, "stream_id": number}
        await ours.send("GENERATE " + json.dumps(asked))
        while True:
            answers = json.loads((await ours.receive()).partition(" ")[2])
            if any(each.get("finish_reason") for each in answers):
                return
            assert not any("error" in each for each in answers), answers

    try:
        return await _traced(tracer, model, ask)
    finally:
        await server.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _trace_llm(tracer: Tracer, model: Any, name: str) -> Passed:
    from bridle.llm import LLM
    from bridle.sampling import SamplingParams

    llm, sampling = LLM(model), SamplingParams(max_tokens=MAX_TOKENS)

    async def ask() -> None:
        if name == "llm.chat":
            llm.chat(_CHAT["messages"], sampling)
        else:
            llm.generate("Hello there", sampling)

    return await _traced(tracer, model, ask)


async def trace(names: list[str], tracer: Tracer | None = None) -> dict[str, Passed]:
    """Return for each of these APIs the functions that run for one prompt."""
    from bridle.logs import configure_logs

    configure_logs("json", "warning")
    tracer = tracer or Tracer()
    tracer.install()
    found: dict[str, Passed] = {}
    try:
        with _model() as model:
            over_http = [name for name in names if name in HTTP]
            if over_http:
                await _trace_http(tracer, model, over_http, found)
            for name in names:
                if name == "batch file":
                    found[name] = await _trace_batch(tracer, model)
                elif name == "lmtp":
                    found[name] = await _trace_lmtp(tracer, model)
                elif name in LOCAL:
                    found[name] = await _trace_llm(tracer, model, name)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


# -- what is told ----------------------------------------------------------------------------------------------


def count(passed: Passed, package: str = "") -> tuple[int, int]:
    """Return the numbers of files and functions, in all of bridle or in one package."""
    within = {name: functions for name, functions in passed.items() if name.startswith(f"bridle/{package}")}
    return len(within), sum(map(len, within.values()))


_GROUPS = {"front": ("http/", "lmtp/", "llm/", "chat/"), "serving": ("serving/", "tokenizer/"), "engine": ("engine/",)}


def table(found: dict[str, Passed]) -> str:
    """Return a table of the files and functions of each API, in total and by location."""
    lines = [f"{'':16}{'files':>7}{'functions':>11}   " + "".join(f"{name:>16}" for name in (*_GROUPS, "others"))]
    for name, passed in found.items():
        files, functions = count(passed)
        shares = [
            tuple(map(sum, zip(*(count(passed, one) for one in group), strict=True))) for group in _GROUPS.values()
        ]
        others = (files - sum(each[0] for each in shares), functions - sum(each[1] for each in shares))
        told = "".join(f"{each[0]:>8} {each[1]:>7}" for each in (*shares, others))
        lines.append(f"{name:16}{files:7}{functions:11}   {told}")
    return "\n".join(lines)


def listing(passed: Passed) -> str:
    """Return a list of all functions, grouped by file."""
    return "\n".join(
        f"{name} ({len(passed[name])})\n    " + "\n    ".join(sorted(passed[name])) for name in sorted(passed)
    )


def calls_across_files(calls: Iterable[tuple[CodeType, CodeType | None]]) -> list[tuple[str, str]]:
    """Return the calls between functions of different files as pairs of names. They reach from a chat's route to the
    submission of its request."""
    made = [(callee, caller) for callee, caller in calls if _is_ours(callee) and callee.co_name not in _PARTS]
    names = [callee.co_qualname for callee, _ in made]
    begin, end = names.index("chat_completions") + 1, names.index("AsyncEngine.submit") + 1
    return [
        (_label(caller), _label(callee))
        for callee, caller in made[begin:end]
        if caller is not None and caller.co_filename != callee.co_filename
    ]


def _label(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT.parent).as_posix()} {code.co_qualname}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.path_tracer", description=__doc__.splitlines()[0])
    parser.add_argument("api", nargs="?", choices=(*HTTP, *LOCAL), help="list what this one passes")
    parser.add_argument("--calls", action="store_true", help="list what a chat calls across files before it runs")
    given = parser.parse_args()
    if given.calls:
        tracer = Tracer()
        asyncio.run(trace(["chat"], tracer))
        print("\n".join(f"{caller} -> {callee}" for caller, callee in calls_across_files(tracer.calls)))
        return
    chosen = given.api
    found = asyncio.run(trace([chosen] if chosen else [*HTTP, *LOCAL]))
    print(listing(found[chosen]) if chosen else table(found))


if __name__ == "__main__":
    main()
