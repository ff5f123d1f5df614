"""Each thread, asyncio task and child process that a test starts ends with the test, or with its module's fixtures.

The check is made where one module of tests ends, which costs milliseconds. A fixture of the session owns what it
starts. `_LIBRARIES` lists what libraries keep for the process, with the reason. It is switched on by
`make test ARGS="-p tests.owners"`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Generator
from typing import Any

import psutil
import pytest

from tests.waiting import until

#: Threads that live as long as the process, by the beginning of their names.
_LIBRARIES = (
    "execnet",  # pytest-xdist's link to its worker
    "pytest_timeout",
    "asyncio_waitpid",  # ends with its process, which is looked for itself
    "AnyIO worker thread",  # ends when the idle time of its pool is over
    "tokio",
)
#: How long threads and processes have to end by themselves.
SECONDS = 20.0

_first_seen: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
_owned_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_owned_children: set[int] = set()
_open_tasks: list[str] = []


def pytest_sessionstart() -> None:
    """Watch event loops, which cancel at their end what nobody has awaited."""
    runners: Any = asyncio.runners
    cancel_all = runners._cancel_all_tasks

    def watched(loop: asyncio.AbstractEventLoop) -> None:
        _open_tasks.extend(_described(task) for task in asyncio.all_tasks(loop) if not _is_the_loops(task))
        cancel_all(loop)

    runners._cancel_all_tasks = watched
    _owned_threads.update(threading.enumerate())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    before = set(threading.enumerate())
    made = yield
    if fixturedef.scope in ("session", "package"):
        _owned_threads.update(set(threading.enumerate()) - before)
        _owned_children.update(_children())
    return made


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    for thread in _left_threads():
        _first_seen.setdefault(thread, item.nodeid)
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    if lenders := sys.modules.get("tests.fakes.compile_children"):
        lenders.end_spare_children()
    if _left_threads() or _left_children():
        gc.collect()  # what is owned by garbage ends with it
    with contextlib.suppress(AssertionError):
        until(lambda: not (_left_threads() or _left_children()), seconds=SECONDS)
    left = _report()
    if left:
        pytest.fail("left behind by this module:\n" + "\n".join(left), pytrace=False)


def _report() -> list[str]:
    """Return a line for each thing without an owner; each is reported once."""
    threads = _left_threads()
    left = [f"thread {thread.name!r}, seen first in {_first_seen.get(thread, 'the end')}" for thread in threads]
    children = _left_children()
    for child in children:
        with contextlib.suppress(psutil.Error):
            left.append(f"process {child}: {' '.join(psutil.Process(child).cmdline())[:200]}")
    left += [f"task {task}" for task in _open_tasks]
    _owned_threads.update(threads)
    _owned_children.update(children)
    _open_tasks.clear()
    return left


def _left_threads() -> list[threading.Thread]:
    threads = set(threading.enumerate()) - set(_owned_threads)
    return [thread for thread in threads if not thread.name.startswith(_LIBRARIES)]


def _left_children() -> set[int]:
    return _children() - _owned_children


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _is_the_loops(task: asyncio.Task[Any]) -> bool:
    """Return whether the loop itself made the task, to close an asynchronous generator that was left."""
    return type(task.get_coro()).__name__.startswith("async_generator")


def _described(task: asyncio.Task[Any]) -> str:
    return f"{task.get_name()!r} of {getattr(task.get_coro(), '__qualname__', task.get_coro())}"
