"""Threads that end with their work, and futures that another thread completes.

On a CPU, torch computes with OpenMP. OpenMP keeps a team of worker threads for every thread that has ever computed,
until that thread ends. If all teams together have more threads than there are processors, GNU's OpenMP lets none of
them wait actively. Each step of a model with half a billion weights is then a quarter slower, because the workers must
be woken. So code that computes only once, to load a model or to try a step, must run in a thread that ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, InvalidStateError
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Niceness that is added to a thread of low priority. Next to a busy thread it then gets a tenth of a processor.
_BEHIND = 10


def start_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run `function` in a new thread, which does not keep the process alive. The future returns the result of
    `function`."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def run_in_thread(function: Callable[[], T], name: str = "bridle-apart") -> T:
    """Run `function` in a new thread, and wait for its result."""
    return start_thread(function, name).result()


def run_after(function: Callable[[], T], name: str) -> T:
    """Run `function` in a new thread of low priority, and wait for its result. The new thread and its workers get only
    the processor time that other threads leave, if the system has priorities for single threads."""

    def run() -> T:
        if sys.platform == "linux":
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, min(os.getpriority(os.PRIO_PROCESS, me) + _BEHIND, 19))
        return function()

    return run_in_thread(run, name)


def set_future_result(future: Future[T], outcome: T | BaseException) -> bool:
    """Complete a future with a result or an error. Returns False if the future was cancelled; then no thread waits for
    it."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        return False
    return True


def conclude_all(futures: Iterable[Future[None]], error: BaseException | None) -> None:
    """Complete the futures that were not cancelled: with the error if there is one, else with None."""
    for future in futures:
        if not future.set_running_or_notify_cancel():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


class ThreadPerCall(Executor):
    """An executor that gives each call a new thread. The caller must limit the number of calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return start_thread(lambda: fn(*args, **kwargs), self._name)
