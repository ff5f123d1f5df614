"""Stores the traces of a server: clients' traces for some minutes in memory, and a share of all requests in a folder.

A request is traced if its client asks for a trace, or if it is in the share that the operator set. Clients' traces are
kept in limited memory, each visible only to its user. If there is a state file, clients' traces are also saved in it. A
thread converts traces to text and writes them, because long traces take time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from bridle.errors import InvalidRequest, UnknownTrace
from bridle.safe_repr import short_repr
from bridle.serving.state_db import StateTable
from bridle.serving.tenancy.per_user_store import PerUserStore, StoreBounds
from bridle.traces import Trace, encode_trace

#: The header by which a call asks for a trace.
HEADER = "x-bridle-trace"
#: Limits: seconds (ten minutes), number of traces of all users and of one, bytes of all users and of one in memory.
BOUNDS = StoreBounds(600.0, 65_536, 65_536, 128 << 20, 32 << 20)
#: Maximum number of bytes in the operator's folder; the oldest files are removed first.
MAX_FOLDER_BYTES = 1 << 30
#: Estimated number of bytes of a record, until the real size is known.
_RECORD_BYTES = 1024
#: Counted events of traces: asked for by clients, chosen for the operator, incomplete; files written, not written, and
#: removed to make room.
TRACE_EVENTS = ("asked", "chosen", "cut", "written", "failed", "removed")
_OFF = frozenset({"", "0", "false", "no", "off"})
_log = logging.getLogger(__name__)

#: Reply to a client that asks for a trace of a text to which a policy applies.
UNDER_POLICY = "no; a policy holds for this text, and a trace would tell what it took back"
#: Whether a client wants a trace (`kept`), and also the records while the request runs (`told`).
Wish = Literal["no", "kept", "told"]


def wish_of(headers: Mapping[str, str], field: bool | str | None) -> Wish:
    """Return the tracing that a header and a field ask for: a trace to fetch afterwards (`true`), or also the records
    as `events`. If header and field differ, the field counts."""
    said = headers.get(HEADER, "").strip().lower() if field is None else field
    if said == "events":
        return "told"
    if isinstance(said, str) and said in _OFF:
        return "no"
    if said not in (True, False, "1", "true", "yes", "on"):
        raise InvalidRequest(f"trace is {short_repr(said)}; must be true, false or 'events'", "trace")
    return "kept" if said else "no"


class TraceStore:
    """Store of traces. A `share` of all requests, from 0 to 1, is written to `folder`."""

    def __init__(
        self,
        folder: Path | None = None,
        share: float = 0.0,
        *,
        bounds: StoreBounds = BOUNDS,
        max_folder_bytes: int = MAX_FOLDER_BYTES,
        clock: Callable[[], float] = time.monotonic,
        table: StateTable | None = None,
    ) -> None:
        self.folder, self.share, self.max_folder_bytes = folder, share, max_folder_bytes
        self.texts: PerUserStore[Future[bytes]] = PerUserStore(bounds, clock)
        self._table = table
        if table is not None:
            self._restore(table)
        self.counts: Counter[str] = Counter()  # by `TRACE_EVENTS`
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # serializes changes of the folder

    def _restore(self, table: StateTable) -> None:
        """Load the traces that were saved in the state file."""
        self.texts.on_drop = table.drop
        for user, name, seconds, value in table.rows():
            text: Future[bytes] = Future()
            text.set_result(value)
            self.texts.keep(user, name, text, len(value), seconds)

    def is_chosen(self, request_id: str) -> bool:
        """Return whether a request is in the share that the operator set. The choice depends only on the request's
        id."""
        if self.folder is None or not self.share:
            return False
        number = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")
        return number < self.share * 2.0**64

    def keep(self, request_id: str, user: str, traces: Sequence[Trace], *, is_wanted: bool) -> None:
        """Store the traces of a finished request: for `user` if `is_wanted`, and in the folder if the request is in the
        operator's share."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="bridle-traces")
        text = self._threads.submit(self._encode, traces)
        self.counts["asked"] += is_wanted
        if self.is_chosen(request_id):
            self.counts["chosen"] += 1
            self._threads.submit(self._write, request_id, text)
        if is_wanted:
            size = sum(len(trace.header.prompt) * 16 + trace.num_records * _RECORD_BYTES for trace in traces)
            self.texts.keep(user, request_id, text, size)
            text.add_done_callback(lambda done: self._measure(user, request_id, done))

    def _measure(self, user: str, request_id: str, text: Future[bytes]) -> None:
        """Set the real size of a trace after it is converted to text."""
        if not text.cancelled() and text.exception() is None:
            self.texts.resize(user, request_id, text, len(text.result()))
            if self._table is not None and self.texts.find(user, request_id) is text:
                self._table.put(user, request_id, self.texts.bounds.seconds, text.result())

    async def find(self, request_id: str, user: str) -> bytes:
        """Return the trace of a request of `user`, as JSON lines. Raises `UnknownTrace`."""
        text = self.texts.find(user, request_id)
        if text is None:
            raise UnknownTrace(
                f"this user has no trace of a request {request_id[:100]!r}: the request did not set `trace` or "
                f"{HEADER}, is not finished, or a policy applied to its text, or the trace has expired",
                "request_id",
            )
        return await asyncio.wrap_future(text)

    def close(self) -> None:
        """Write the traces that are not written yet. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    # -- the folder ------------------------------------------------------------------------------------------

    def _write(self, request_id: str, text: Future[bytes]) -> None:
        assert self.folder is not None
        try:
            with self._lock:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self.folder / f"{request_id}.jsonl"
                path.touch(mode=0o600)
                path.write_bytes(text.result())
                self.counts["written"] += 1
                self._make_room()
        except Exception as error:
            self.counts["failed"] += 1
            _log.warning("the trace of request %s could not be written: %s", request_id, error)

    def _make_room(self) -> None:
        assert self.folder is not None
        files = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in self.folder.glob("*.jsonl"))
        total = sum(size for _, size, _ in files)
        for _, size, file in files[:-1]:
            if total <= self.max_folder_bytes:
                return
            with contextlib.suppress(OSError):
                file.unlink()
                self.counts["removed"] += 1
            total -= size

    def _encode(self, traces: Sequence[Trace]) -> bytes:
        self.counts["cut"] += any(trace.num_cut for trace in traces)
        return b"".join(map(encode_trace, traces))
