"""Tests of batches on the server, with the real OpenAI client: they run in the background, are limited, survive
restarts, and are private."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from bridle.errors import Overloaded
from bridle.http import HttpSettings, create_app
from bridle.http.openai.batches import runner
from bridle.http.state import HttpState
from bridle.serving import ModelRegistry
from bridle.serving.outputs import batch_store
from bridle.serving.outputs.batch_store import WINDOW, BatchStore
from bridle.serving.outputs.file_store import FileStore
from bridle.serving.tenancy.keys import Identity, KeyStore
from bridle.serving.tenancy.per_user_store import StoreBounds
from bridle.serving.tenancy.rate_limit import MAX_PRIORITY
from tests.http.harness import Heard, local_client, saying, scripted_model
from tests.waiting import PATIENCE, until_async

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "Say"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say"}]},
    "/v1/responses": {"input": "Say"},
    "/v1/embeddings": {"input": "Say"},
}


def line(custom_id: str, url: str = "/v1/completions", **fields: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": BODIES.get(url, {}) | fields})


@dataclass
class Server:
    app: FastAPI
    heard: Heard
    keys: KeyStore
    alice: openai.AsyncOpenAI
    bob: openai.AsyncOpenAI

    @property
    def http(self) -> HttpState:
        http: HttpState = self.app.state.http
        return http

    async def upload(self, *lines: str, client: openai.AsyncOpenAI | None = None) -> str:
        file = ("in.jsonl", "\n".join(lines).encode())
        return (await (client or self.alice).files.create(file=file, purpose="batch")).id

    async def begin(self, *lines: str, endpoint: Any = "/v1/completions") -> Any:
        file = await self.upload(*lines)
        return await self.alice.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h")

    async def end(self, name: str) -> Any:
        return await self.reach(name, lambda batch: batch.status not in OPEN)

    async def reach(self, name: str, is_reached: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not is_reached(batch := await self.alice.batches.retrieve(name)):  # noqa: ASYNC110 - as clients do
                await asyncio.sleep(0.01)
        return batch

    async def lines_of(self, file: str | None) -> dict[str, Any]:
        assert file is not None
        content = (await self.alice.files.content(file)).text
        return {each["custom_id"]: each for each in map(json.loads, content.splitlines())}


@asynccontextmanager
async def server(folder: Path, next_token: Any = None, **settings: Any) -> AsyncIterator[Server]:
    """Yield a server with a state file and two users. The server resumes unfinished batches."""
    model = scripted_model(next_token=next_token or saying("Yes."), embedding_size=8)
    (folder / "keys.db").unlink(missing_ok=True)
    keys = KeyStore(folder / "keys.db")
    app = create_app(ModelRegistry([model]), HttpSettings(state_db=folder / "state.db", **settings), keys)
    client: Callable[[], Any] = partial(httpx.AsyncClient, transport=httpx.ASGITransport(app=app))
    alice, bob = (
        openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key=keys.add(name),
            http_client=client(),
            max_retries=0,
        )
        for name in ("alice", "bob")
    )
    task = asyncio.create_task(app.state.batches.run())
    await asyncio.sleep(0)
    try:
        yield Server(app, Heard(model), keys, alice, bob)
    finally:
        task.cancel()
        await asyncio.gather(task, alice.close(), bob.close(), return_exceptions=True)
        app.state.http.save()
        keys.close()
        model.close()


def run(folder: Path, work: Callable[[Server], Awaitable[None]], **options: Any) -> None:
    async def inner() -> None:
        async with server(folder, **options) as made:
            await work(made)

    asyncio.run(inner())


class Gate:
    """A model that writes one word after the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._say = saying("Yes.")

    def __call__(self, prefix: Any) -> int:
        assert self.opened.wait(PATIENCE)
        return self._say(prefix)


@pytest.mark.parametrize("endpoint", runner.ENDPOINTS)
def test_lines_are_answered_last_of_all_and_errors_have_a_file(tmp_path: Path, endpoint: str) -> None:
    async def work(made: Server) -> None:
        lines = [line("a", endpoint), "", line("b", endpoint, priority=-1), line("bad", endpoint, model="nobody")]
        file = await made.upload(*lines)
        batch = await made.alice.batches.create(
            input_file_id=file,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
            metadata={"c": "d"},
        )
        assert (batch.status, batch.metadata) == ("validating", {"c": "d"})
        ended = await made.end(batch.id)
        assert (ended.status, ended.errors, ended.input_file_id) == ("completed", None, file)
        assert ended.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        assert ended.created_at <= ended.in_progress_at <= ended.completed_at < ended.expires_at
        good, bad = await made.lines_of(ended.output_file_id), await made.lines_of(ended.error_file_id)
        assert [*good] == ["a", "b"] and all(each["error"] is None for each in good.values())
        assert good["a"]["response"]["status_code"] == 200
        assert "Yes." in json.dumps(good["a"]["response"]["body"]) or endpoint == "/v1/embeddings"
        assert bad["bad"]["response"]["status_code"] == 404
        assert "'nobody'" in bad["bad"]["response"]["body"]["error"]["message"]
        assert {request.priority for request in made.heard.requests} == {MAX_PRIORITY}

    run(tmp_path, work)


def test_bad_lines_fail_the_whole_batch(tmp_path: Path) -> None:
    async def work(made: Server) -> None:
        lines = [line("a"), "{", line("a"), line("b", "/v1/embeddings"), line("c", client_tools=["ask"])]
        failed = await made.end((await made.begin(*lines)).id)
        assert failed.status == "failed" and failed.failed_at
        assert [(error.line, error.message[:18]) for error in failed.errors.data] == [
            (2, "line 2 is not a ba"),
            (3, "line 3 repeats cus"),
            (4, "line 4 requests 'P"),
            (5, "line 5 has client_"),
        ]
        empty = await made.end((await made.begin("")).id)
        assert "the file has none of the 1 to 50000 lines" in empty.errors.data[0].message
        assert made.heard.requests == []

    run(tmp_path, work)


def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async def work(made: Server) -> None:
        names = [await made.upload(line(each)) for each in "ab"]
        info = await made.alice.files.retrieve(names[0])
        assert (info.filename, info.bytes, info.purpose) == ("in.jsonl", len(line("a")), "batch")
        assert [each.id async for each in made.alice.files.list(order="asc", limit=1)] == names
        assert (await made.alice.files.list(purpose="batch_output")).data == []
        assert (await made.alice.files.content(names[1])).text == line("b")
        assert (await made.alice.files.delete(names[0])).deleted
        with pytest.raises(openai.NotFoundError, match="Upload it again"):
            await made.alice.files.content(names[0])

    run(tmp_path, work)


def test_a_restart_continues_with_the_lines_that_have_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_IN_FLIGHT", 1)
    names: list[str] = []

    async def begin(made: Server) -> None:
        add = made.http.batches.add_answer

        def add_and_close(*values: Any) -> None:
            add(*values)
            made.http.is_draining = True

        made.http.batches.add_answer = add_and_close  # type: ignore[method-assign,assignment]
        names.append((await made.begin(*map(line, "abc"))).id)
        batch = await made.reach(names[0], lambda batch: not made.app.state.batches.running)
        assert (batch.status, batch.request_counts.completed, len(made.heard.requests)) == ("in_progress", 1, 1)

    async def again(made: Server) -> None:
        ended = await made.end(names[0])
        assert (ended.status, ended.request_counts.completed) == ("completed", 3)
        assert [*await made.lines_of(ended.output_file_id)] == ["a", "b", "c"]
        assert len(made.heard.requests) == 2

    async def later(made: Server) -> None:
        (batch,) = (await made.alice.batches.list()).data
        assert [*await made.lines_of(batch.output_file_id)] == ["a", "b", "c"]
        assert made.http.batches.kept_answers == {}

    for work in (begin, again, later):
        run(tmp_path, work)


def test_cancelled_batches_leave_nothing_that_waits(tmp_path: Path) -> None:
    gate = Gate()

    async def work(made: Server) -> None:
        first = await made.begin(line("a"))
        for _ in range(20):  # more than may be open at once
            name = (await made.begin(line("b"))).id
            assert (await made.alice.batches.cancel(name)).status == "cancelled"
        assert made.app.state.batches.waiting == {}
        gate.opened.set()
        assert (await made.end(first.id)).status == "completed"

    run(tmp_path, work, next_token=gate)


def test_a_cancelled_batch_keeps_what_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_IN_FLIGHT", 1)
    gate = Gate()

    async def work(made: Server) -> None:
        first, second = [await made.begin(*map(line, "abc")) for _ in range(2)]
        await made.reach(first.id, lambda _: bool(made.heard.requests))
        assert (await made.alice.batches.cancel(second.id)).status == "cancelled"
        assert (await made.alice.batches.cancel(first.id)).status == "cancelling"
        gate.opened.set()
        ended = await made.end(first.id)
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("cancelled", 1, 2)
        assert [*await made.lines_of(ended.output_file_id)] == ["a"]
        errors = await made.lines_of(ended.error_file_id)
        assert [each["error"]["code"] for each in errors.values()] == ["batch_cancelled"] * 2
        with pytest.raises(openai.BadRequestError, match="its status is cancelled"):
            await made.alice.batches.cancel(first.id)
        assert len(made.heard.requests) == 1

    run(tmp_path, work, next_token=gate)


def test_a_batch_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_IN_FLIGHT", 1)
    gate = Gate()

    async def work(made: Server) -> None:
        batch = await made.begin(*map(line, "ab"))
        await made.reach(batch.id, lambda _: bool(made.heard.requests))
        made.http.batches.now = lambda: batch.created_at + WINDOW
        gate.opened.set()
        ended = await made.end(batch.id)
        assert (ended.status, ended.expired_at) == ("expired", ended.expires_at)
        assert (await made.lines_of(ended.error_file_id))["b"]["error"]["code"] == "batch_expired"

    run(tmp_path, work, next_token=gate)


def test_answers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_IN_FLIGHT", 1)
    monkeypatch.setattr(runner, "MAX_ANSWER_BYTES", 1)

    async def work(made: Server) -> None:
        ended = await made.end((await made.begin(*map(line, "ab"))).id)
        assert (ended.status, ended.errors.data[0].code) == ("failed", "batch_too_large")
        assert [*await made.lines_of(ended.output_file_id)] == ["a"]
        assert [*await made.lines_of(ended.error_file_id)] == ["b"]

    run(tmp_path, work)


def test_a_line_without_room_is_sent_again(tmp_path: Path) -> None:
    async def work(made: Server) -> None:
        pauses: list[float] = []

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.sleep(0.01)

        made.app.state.batches.sleep = pause
        ended = await made.end((await made.begin(*map(line, "abcd"))).id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 4)
        assert pauses[0] == 1

    run(tmp_path, work, max_requests=1)


def test_lines_end_with_their_users_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_IN_FLIGHT", 1)
    gate, key = Gate(), Identity("alice", False)

    async def work(made: Server) -> None:
        batch = await made.begin(*map(line, "ab"))
        await made.reach(batch.id, lambda _: bool(made.heard.requests))
        made.keys.remove("alice")
        gate.opened.set()
        await until_async(lambda: made.http.batches.find(key.user, batch.id).is_over)
        ended = made.http.batches.find(key.user, batch.id)
        assert (ended.completed, ended.failed) == (1, 1)
        assert b'"status_code":401' in made.http.files.find(key.user, str(ended.error_file_id)).content

    run(tmp_path, work, next_token=gate)


def test_others_get_404_and_users_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_OPEN", 1)
    gate = Gate()

    async def work(made: Server) -> None:
        batch, bob = await made.begin(line("a")), made.bob
        file = batch.input_file_id
        for call in (
            bob.files.retrieve(file),
            bob.files.content(file),
            bob.files.delete(file),
            bob.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h"),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError, match="is kept for this user"):
                await call
        assert (await bob.files.list()).data == [] == (await bob.batches.list()).data
        with pytest.raises(openai.RateLimitError, match="1 batches of this user wait or run; at most 1"):
            await made.begin(line("a"))
        gate.opened.set()
        ended = await made.end(batch.id)
        with pytest.raises(openai.BadRequestError, match="with the purpose 'batch_output'; must be 'batch'"):
            await made.alice.batches.create(
                input_file_id=ended.output_file_id, endpoint="/v1/completions", completion_window="24h"
            )

    run(tmp_path, work, next_token=gate)


def form(*parts: tuple[str, str], boundary: str = "B", end: str = "--") -> bytes:
    texts = [f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n{text}\r\n" for head, text in parts]
    return ("".join(texts) + f"--{boundary}{end}\r\n").encode()


FILE, PURPOSE = ('name="file"; filename="ä.jsonl"', "{}\r\n"), ('name="purpose"', "batch")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (form(FILE), "purpose: got ''; must be 'batch'"),
        (form(FILE, ('name="purpose"', "vision")), "purpose: got 'vision'"),
        (form(PURPOSE), "file is missing"),
        (form(FILE, PURPOSE, ('name="expires_after[seconds]"', "9")), "'expires_after[seconds]' is not supported"),
        (form(FILE, PURPOSE, end=""), "the form is cut off"),
        (form(*[FILE] * 40), "more than 16 fields"),
        (form(("filename=x", "")), "has no name"),
        (form((f'name="file"; filename="{"x" * 300}"', "")), "the file's name has 300 characters"),
        (b"--B\r\n\r\n--B--", "has no header"),
        (b"{}", "the form is cut off"),
    ],
)
def test_bad_forms_are_refused(body: bytes, said: str) -> None:
    with local_client(scripted_model()) as client:
        headers = {"content-type": "multipart/form-data; boundary=B"}
        answer = client.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
        assert "must be multipart/form-data" in client.post("/v1/files", content=body).text
        made = client.post("/v1/files", content=form(PURPOSE, FILE), headers=headers).json()
        assert (made["filename"], made["bytes"]) == ("ä.jsonl", 4)
        assert client.get(f"/v1/files/{made['id']}/content").content == b"{}\r\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"endpoint": "/v1/models"}, "endpoint: got '/v1/models'; must be one of"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-x"}, "input_file_id: no file 'file-x' is kept"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after is not supported"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ],
)
def test_bad_batches_are_refused(change: dict[str, Any], said: str) -> None:
    with local_client(scripted_model()) as client:
        body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"} | change
        answer = client.post("/v1/batches", json=body)
        assert answer.status_code in (400, 404)
        assert said in answer.json()["error"]["message"]


def test_stores_are_bounded() -> None:
    bounds = StoreBounds(100.0, 9, 2, 1 << 20, 18_000)
    files, batches = FileStore(bounds), BatchStore(StoreBounds(100.0, 9, 2, 400, 400))
    names = [files.create("u", "f", "batch", b"x" * 9_000).id for _ in range(3)]
    assert [file.id for file in files.of("u")] == names[2:]
    with pytest.raises(ValueError, match="keeps at most 9000 bytes"):
        files.create("u", "f", "batch", b"x" * 9_001)
    with pytest.raises(Overloaded, match="fill the storage"):
        batches.create(Identity("u", False), "/v1/completions", "file-1", {})
