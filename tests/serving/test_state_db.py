"""Tests that state in a file survives restarts and `kill -9`, is limited in size, and belongs to one process."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.errors import InvalidRequest, UnknownCache, UnknownResponse
from bridle.serving.outputs.response_store import BOUNDS, ResponseStore
from bridle.serving.prompt_caches import CacheLimits, PromptCaches
from bridle.serving.state_db import StateDb
from bridle.serving.tenancy.keys import Identity
from bridle.serving.tracing.trace_store import TraceStore
from tests.conftest import IS_FULL
from tests.waiting import until

LIMITS = CacheLimits(9, 1_000, 16)


def responses(db: StateDb, **bounds: float) -> ResponseStore:
    return ResponseStore(replace(BOUNDS, **bounds), table=db.table("responses"))  # type: ignore[arg-type]


def test_what_was_kept_is_there_again_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.db"
    for number in range(3):
        db = StateDb(path)
        store, caches = responses(db), PromptCaches(table=db.table("prompt_caches"))
        if number == 0:
            store.keep("ada", {"id": "r1", "text": "é"}, [{"a": 1}])
            store.keep("ada", {"id": "r2"}, [])
            made = caches.add("ada", "m", None, range(40), 60.0, LIMITS)
        elif number == 1:
            assert store.response("ada", "r1") == {"id": "r1", "text": "é"}
            assert store.input_items("ada", "r1") == [{"a": 1}]
            store.delete("ada", "r1")
            assert caches.find(Identity("ada", False), made.id) == made
            with pytest.raises(UnknownCache):
                caches.find(Identity("eve", False), made.id)
            caches.drop(made)
        else:
            assert store.response("ada", "r2") == {"id": "r2"}
            assert (len(store), caches.of_user("ada")) == (1, [])
            for user, name in (("ada", "r1"), ("eve", "r2")):
                with pytest.raises(UnknownResponse):
                    store.response(user, name)
        db.close()
        db.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_bounds_hold_in_the_file_and_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    db = StateDb(path)
    store = responses(db, max_of_user=3)
    for number in range(9):
        store.keep(f"user {number % 2}", {"id": str(number)}, ["x" * 1_000])
    db.close()
    with closing(sqlite3.connect(path)) as connection:
        assert sorted(connection.execute("SELECT name FROM entries")) == [(str(each),) for each in range(3, 9)]
    db = StateDb(path)
    assert len(responses(db, max_of_user=2)) == 4
    db.close()
    db = StateDb(path)
    assert len(list(db.rows("responses"))) == 4
    db.close()


def test_what_is_over_is_not_found_again(tmp_path: Path) -> None:
    now = [1_000.0]
    path = tmp_path / "state.db"
    for left, number in ((None, 2), (30.0, 1), (90.0, 0)):
        db = StateDb(path, lambda: now[0])
        if left is None:
            db.table("t").put("u", "short", 20.0, b"1")
            db.table("t").put("u", "long", 100.0, b"2")
        else:
            now[0] += left
            db.close()
            db = StateDb(path, lambda: now[0])
            rows = list(db.rows("t"))
            assert [row.seconds for row in rows] == [70.0] * number
        db.close()


def test_a_trace_is_fetched_after_a_restart(tmp_path: Path) -> None:
    for number in range(2):
        db = StateDb(tmp_path / "state.db")
        traces = TraceStore(table=db.table("traces"))
        if number == 0:
            traces.keep("request", "ada", [], is_wanted=True)
            traces.texts.find("ada", "request").result(60)  # type: ignore[union-attr]
        traces.close()
        assert asyncio.run(traces.find("request", "ada")) == b""
        db.close()


def test_a_file_belongs_to_one_server_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    db = StateDb(tmp_path / "state.db")
    for wrong in (tmp_path / "state.db", tmp_path, tmp_path / "text"):
        (tmp_path / "text").write_text("no database at all, and long enough to be read as one" * 9)
        with pytest.raises(InvalidRequest, match="state_db: got"):
            StateDb(wrong)
    db.close()


_WRITER = """
import sys
from pathlib import Path
from bridle.serving.outputs.response_store import ResponseStore
from bridle.serving.state_db import StateDb
from bridle.serving.tenancy.keys import Identity
store = ResponseStore(table=StateDb(Path(sys.argv[1])).table("responses"))
for number in range(10**9):
    store.keep("u", {"id": f"{number:09d}", "text": str(number) * 300}, [])
    print(number, flush=True)
"""


def committed_bytes(path: Path) -> int:
    """Return the size of the write-ahead log up to its last commit. No other process may open the database. A frame of
    the log has 24 bytes before its page; bytes 4 to 8 are not zero if the frame ends a transaction."""
    log = path.with_name(f"{path.name}-wal")
    data = log.read_bytes() if log.exists() else b""
    page = int.from_bytes(data[8:12], "big") or 4096
    ends = [at for at in range(32, len(data) - page, 24 + page) if any(data[at + 4 : at + 8])]
    return ends[-1] if ends else 0


def test_kill_9_loses_the_last_entries_alone_and_damages_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for _ in range(2 if IS_FULL else 1):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(300):
            assert process.stdout.readline()
        until(lambda: committed_bytes(path) > 1 << 17, "entries on disk, beside the tables")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        db = StateDb(path)
        names = sorted(row.name for row in db.rows("responses"))
        store = responses(db)
        assert len(names) == len(store) > 0
        numbers = [int(name) for name in names]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))  # without a gap
        for number in numbers:
            assert store.response("u", f"{number:09d}")["text"] == str(number) * 300
        db.close()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        os.unlink(path)
