"""Answers batches in the background: a limited number of lines at once, with the lowest priority.

At any time, each user has at most one running batch, and all users together have at most `MAX_RUNNING`. The lines are
passed to the application, so they are checked, limited and counted like the user's other requests. If an overloaded
server refuses a line, the line is sent again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

import msgspec
import structlog
from starlette.types import ASGIApp

from bridle.errors import BridleError, InvalidRequest, Overloaded, Unauthorized, UnknownBatch
from bridle.http.errors import error_body
from bridle.http.openai.batch import Answer, BatchRequest, LineReader, answer_line, answer_request, answers_of
from bridle.serving.outputs.batch_store import Batch, BatchStore
from bridle.serving.outputs.file_store import FileStore
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tenancy.rate_limit import MAX_PRIORITY

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.http")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
#: Limits: running batches, lines at once of a batch, lines of a batch, and bytes of a batch's answers.
MAX_RUNNING, MAX_IN_FLIGHT, MAX_LINES, MAX_ANSWER_BYTES = 4, 8, 50_000, 16 << 20
_MAX_ERRORS = 100
_MAX_PAUSE = 60  # seconds before a line is sent again
_MAX_TRIES = 16  # attempts to send a line while the server answers 503
_WHY = {
    "expired": "the batch expired before this line was answered; send it in a new batch",
    "cancelled": "the batch was cancelled before this line was answered",
    "failed": f"the answers of the batch would have more than {MAX_ANSWER_BYTES} bytes; send this line in a new batch",
}


class Line(NamedTuple):
    """A request of a batch file, and its line number."""

    number: int
    request: BatchRequest


class BatchRunner:
    """Runs the batches of a server. `identify` returns the user of a batch with current rights; None if the user has no
    key any more. If `is_closing` returns true, no further line begins, and batches stay unfinished. Use the runner in
    one event loop only."""

    def __init__(
        self,
        app: ASGIApp,
        files: FileStore,
        batches: BatchStore,
        identify: Callable[[Batch], Identity | None],
        is_closing: Callable[[], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._app, self._files, self._batches = app, files, batches
        self._identify, self._is_closing, self.sleep = identify, is_closing, sleep
        self.waiting: dict[str, deque[Batch]] = {}  # by user; the user who waits longest is first
        self.running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by user: id and task

    async def run(self) -> None:
        """Run queued and unfinished batches until this task is cancelled, which cancels all running lines."""
        for batch in self._batches.unfinished():
            self.start(batch)
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting.clear()
            tasks = [task for _, task in self.running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, batch: Batch) -> None:
        """Queue a batch; it runs when a slot for its user is free."""
        self.waiting.setdefault(batch.user, deque()).append(batch)
        self._fill()

    def cancel(self, batch: Batch) -> Batch:
        """Cancel a batch: at once if the batch is queued, otherwise when its lines in flight are answered. Raises
        `InvalidRequest`."""
        cancelled = self._batches.cancel(batch)
        name, _ = self.running.get(batch.user, (None, None))
        if name == batch.id:
            return cancelled
        self._leave_queue(batch)
        return self._end(cancelled, "cancelled")

    def _leave_queue(self, batch: Batch) -> None:
        """Remove a batch from its user's queue, so that users who create and cancel many batches do not let the queue
        grow."""
        kept = deque(each for each in self.waiting.get(batch.user, ()) if each.id != batch.id)
        if kept:
            self.waiting[batch.user] = kept  # keeps the user's position in the queue
        else:
            self.waiting.pop(batch.user, None)

    def _fill(self) -> None:
        for user in list(self.waiting):
            if len(self.running) < MAX_RUNNING and user not in self.running:
                queue = self.waiting.pop(user)
                batch = queue.popleft()
                if queue:
                    self.waiting[user] = queue
                task = asyncio.create_task(self._run_safely(batch))
                self.running[user] = batch.id, task
                task.add_done_callback(partial(self._on_done, user))

    def _on_done(self, user: str, _: asyncio.Task[None]) -> None:
        del self.running[user]
        self._fill()

    async def _run_safely(self, batch: Batch) -> None:
        """Run a batch to its end. An unexpected error ends only this batch, not the runner."""
        try:
            await self._run(batch)
        except UnknownBatch:
            self._batches.forget_answers(batch)
        except BridleError as error:
            self._refuse(batch, [_error(error, None)])
        except Exception:
            _log.exception("bug", batch=batch.id)
            self._refuse(batch, [{"code": "server_error", "message": "internal error; the server's log has more"}])

    async def _run(self, batch: Batch) -> None:
        batch = self._batches.find(batch.user, batch.id)
        if batch.is_over:
            return
        file = self._files.find(batch.user, batch.input_file_id, "input_file_id")
        lines, errors = await asyncio.to_thread(read_lines, file.content, batch.endpoint)
        if errors:
            self._refuse(batch, errors)
            return
        if batch.status == "validating" and not self._reason(batch):
            self._batches.change(batch, "in_progress", total=len(lines))
        async for _ in answers_of(partial(self._answer, batch), self._open(batch, lines), MAX_IN_FLIGHT):
            pass
        reason = self._reason(batch)
        if reason != "closing":
            self._end(batch, reason or "completed", lines)

    def _reason(self, batch: Batch) -> str | None:
        """Return why no further line may begin: the batch's final status, `closing`, or None if lines may begin. Raises
        `UnknownBatch`."""
        if self._batches.find(batch.user, batch.id).status == "cancelling":
            return "cancelled"
        if self._batches.answers(batch).num_bytes > MAX_ANSWER_BYTES:
            return "failed"
        if self._batches.now() >= batch.expires:
            return "expired"
        return "closing" if self._is_closing() else None

    def _open(self, batch: Batch, lines: list[Line]) -> Iterator[Line]:
        """Yield the lines that have no answer yet, as long as further lines may begin."""
        answers = self._batches.answers(batch)
        for line in lines:
            if line.number not in answers.good and line.number not in answers.bad:
                if self._reason(batch):
                    return
                yield line

    async def _answer(self, batch: Batch, line: Line) -> None:
        """Send the request of a line and store the answer, unless the batch ends first."""
        for attempt in count():
            answer = await self._send(batch, line.request)
            status = answer["response"]["status_code"]
            if status >= 400 and self._is_closing():
                return  # the shutdown may be the cause of the error
            if status != 429 and (status != 503 or attempt >= _MAX_TRIES):
                self._batches.add_answer(batch, line.number, status < 400, _encode(answer))
                return
            await self.sleep(min(1 << min(attempt, 6), _MAX_PAUSE))
            if self._reason(batch):
                return

    async def _send(self, batch: Batch, request: BatchRequest) -> Answer:
        sender = self._identify(batch)
        if sender is None:
            error = Unauthorized("the user of this batch has no API key any more; ask the operator for one")
            return answer_line(request.custom_id, {"status_code": 401, "request_id": "", "body": error_body(error)})
        last = msgspec.structs.replace(request, body=request.body | {"priority": MAX_PRIORITY})
        return await answer_request(self._app, last, sender)

    def _refuse(self, batch: Batch, errors: list[dict[str, object]]) -> None:
        """End a batch as failed, because none of its lines can be answered."""
        try:
            self._batches.change(batch, "failed", errors=errors)
        except (UnknownBatch, Overloaded):
            _log.warning("batch not kept", batch=batch.id)
        self._batches.forget_answers(batch)

    def _end(self, batch: Batch, status: str, lines: list[Line] | None = None) -> Batch:
        """Write the output and error files of a batch, and set its final status. Each line without an answer gets an
        error."""
        answers = self._batches.answers(batch)
        for number, request in lines or ():
            if number not in answers.good and number not in answers.bad:
                error = {"code": f"batch_{status}", "message": _WHY[status]}
                answers.bad[number] = _encode(answer_line(request.custom_id, None, error))
        values: dict[str, object] = {"completed": len(answers.good), "failed": len(answers.bad)}
        if status == "failed":
            values["errors"] = [{"code": "batch_too_large", "message": _WHY[status]}]
        for kind, found in (("output", answers.good), ("error", answers.bad)):
            if found:
                content = b"".join(found[number] for number in sorted(found))
                file = self._files.create(batch.user, f"{batch.id}_{kind}.jsonl", "batch_output", content)
                values[f"{kind}_file_id"] = file.id
        ended = self._batches.change(batch, status, **values)
        self._batches.forget_answers(batch)
        return ended


def read_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[dict[str, object]]]:
    """Parse a batch file for one route. Returns the requests, and at most `_MAX_ERRORS` errors of lines."""
    reader, lines, errors = LineReader((endpoint,)), [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            request = reader.read(number, line)
        except InvalidRequest as error:
            errors.append(_error(error, number))
        else:
            lines += [] if request is None else [Line(number, request)]
        if len(errors) == _MAX_ERRORS or len(lines) > MAX_LINES:
            break
    if not errors and not 0 < len(lines) <= MAX_LINES:
        said = "none" if not lines else f"more than {MAX_LINES}"
        errors.append(_error(InvalidRequest(f"input_file_id: the file has {said} of the 1 to {MAX_LINES} lines"), None))
    return lines, errors


def _error(error: BridleError, line: int | None) -> dict[str, object]:
    param = getattr(error, "param", None) if line is None else None
    return {"code": error.code, "message": str(error), "param": param, "line": line}


def _encode(answer: Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
