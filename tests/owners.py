"""Check that each thread, asyncio task and child process of a test ends with the test, or with the fixture that owns
it.

Threads and tasks are checked after each test, and child processes after the last test of a module, because that takes
longer. A fixture of a class or module owns what starts while it is made, and may own what its tests start. Both end
with the module. A session fixture owns everything that it starts. A thread's own threads and tasks belong to the
thread's owner. `_LIBRARIES` lists what libraries keep for the whole process, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Generator
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
    "Dummy-",  # Python did not start it, and does not learn of its end
)
#: Tasks that end with their loop, by their functions.
_LIBRARY_TASKS = ("_shutdown_watcher",)  # sse_starlette's, which looks now and then whether the server ends
#: How long threads and processes have to end by themselves.
SECONDS = 60.0
#: How long most of them take, in seconds.
_MOMENT = 0.2

_starters: weakref.WeakKeyDictionary[threading.Thread, threading.Thread] = weakref.WeakKeyDictionary()
_first_seen: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
_owned_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # by the session
_lent_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # by the module
_owned_children: set[int] = set()
_open_tasks: list[str] = []
_failed: set[str] = set()


def pytest_sessionstart() -> None:
    """Record the tasks that event loops cancel or drop at their end, and the threads that start other threads."""
    runners: Any = asyncio.runners
    loops: Any = asyncio.BaseEventLoop
    threads: Any = threading.Thread
    runners._cancel_all_tasks = _noting_tasks(runners._cancel_all_tasks)
    loops.close = _noting_tasks(loops.close)
    start = threads.start

    def started(thread: threading.Thread) -> None:
        starter = threading.current_thread()
        if starter is not threading.main_thread():
            _starters[thread] = starter
        start(thread)

    threads.start = started
    _owned_threads.update(threading.enumerate())


def _noting_tasks(end: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that records the open tasks of a loop, and then ends the loop with `end`."""

    def noting(loop: asyncio.AbstractEventLoop) -> None:
        _open_tasks.extend(_described(task) for task in asyncio.all_tasks(loop) if not _is_owned(task))
        end(loop)

    return noting


def pytest_collection_finish() -> None:
    """Record the threads that imports of test modules have started."""
    _owned_threads.update(threading.enumerate())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    before = set(threading.enumerate())
    made = yield
    started = set(threading.enumerate()) - before
    if fixturedef.scope in ("session", "package"):
        _owned_threads.update(started)
        _owned_children.update(child_ids())
    else:
        _lent_threads.update(started)
    return made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the failed tests, whose leftovers are not reported."""
    if report.failed:
        _failed.add(report.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    for thread in _left_threads():
        _first_seen.setdefault(thread, item.nodeid)
    yield
    ends_module = nextitem is None or nextitem.path != item.path
    if ends_module:
        _lent_threads.clear()
        if lenders := sys.modules.get("tests.fakes.compile_children"):
            lenders.end_spare_children()
    elif _shares_fixtures(item):
        _lent_threads.update(_left_threads())
    left = _left(with_children=ends_module, patience=0.0 if item.nodeid in _failed else SECONDS)
    if left and item.nodeid not in _failed:
        where = "module" if ends_module else "test"
        pytest.fail(f"left behind by this {where}:\n" + "\n".join(left), pytrace=False)


def _shares_fixtures(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture of its class or module."""
    known = getattr(item, "_fixtureinfo", None)
    definitions = () if known is None else known.name2fixturedefs.values()
    return any(each[-1].scope in ("class", "module") for each in definitions)


def _left(*, with_children: bool, patience: float) -> list[str]:
    """Return a line for each new thread, task or process without an owner, after giving it some time to end."""

    def is_left() -> bool:
        return bool(_left_threads() or (with_children and _left_children()))

    with contextlib.suppress(AssertionError):
        until(lambda: not is_left(), seconds=min(_MOMENT, patience))
    if is_left():
        gc.collect()  # what is owned by garbage ends with it
        with contextlib.suppress(AssertionError):
            until(lambda: not is_left(), seconds=patience)
    threads, children = _left_threads(), _left_children() if with_children else set()
    left = [f"thread {thread.name!r}, seen first in {_first_seen.get(thread, 'the end')}" for thread in threads]
    for child in children:
        with contextlib.suppress(psutil.Error):
            left.append(f"process {child}: {' '.join(psutil.Process(child).cmdline())[:200]}")
    left += [f"task {task}" for task in _open_tasks]
    _owned_threads.update(threads)
    _owned_children.update(children)
    _open_tasks.clear()
    return left


def _left_threads() -> list[threading.Thread]:
    left = []
    for thread in threading.enumerate():
        starter = _starters.get(thread)
        for owned in (_owned_threads, _lent_threads):
            if starter in owned:
                owned.add(thread)
        if thread not in _owned_threads and thread not in _lent_threads and not thread.name.startswith(_LIBRARIES):
            left.append(thread)
    return left


def _left_children() -> set[int]:
    return child_ids() - _owned_children


def child_ids() -> set[int]:
    """Return the ids of this process's child processes, without their own child processes."""
    return {child.pid for child in psutil.Process().children()}


def _is_owned(task: asyncio.Task[Any]) -> bool:
    """Return whether a task is cancelled, is a library's, or closes an asynchronous generator for the event loop."""
    if task.cancelling():
        return True
    name = getattr(task.get_coro(), "__qualname__", "")
    return name in _LIBRARY_TASKS or type(task.get_coro()).__name__.startswith("async_generator")


def _described(task: asyncio.Task[Any]) -> str:
    return f"{task.get_name()!r} of {getattr(task.get_coro(), '__qualname__', task.get_coro())}"
