"""Event loop and progress display of a call, in programs and in notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bridle.llm import notebook
from bridle.outputs import RequestOutput
from bridle.serving.lifecycle.request_handle import Report

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result. If an event loop is already running (as in a notebook), the
    coroutine runs in a separate thread. An interrupt cancels the coroutine. The interrupt is raised again after the
    coroutine has ended."""
    if not in_event_loop():
        return asyncio.run(coroutine)
    there = _Elsewhere(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="bridle-llm") as threads:
        try:  # before the thread starts, because an interrupt may come between any two lines
            return threads.submit(asyncio.run, there.run()).result()
        except BaseException:
            there.cancel()
            raise


class _Elsewhere(Generic[T]):
    """A coroutine that runs in the event loop of another thread. `cancel` ends the coroutine, whether or not it has
    begun."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None
        self._is_cancelled = False

    async def run(self) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self._lock:
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            if self._is_cancelled:
                task.cancel()
        return await self._coroutine

    def cancel(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # the loop is closed, so the coroutine has already ended
            self._is_cancelled = True
            if self._cancel is not None:
                self._cancel()


def in_event_loop() -> bool:
    """Return whether the caller runs in an event loop, which it must not block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Count:
    """Counts for the progress bar of a batch: finished requests and generated tokens."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self._show = show
        self._done = self._tokens = 0

    def report(self, output: RequestOutput) -> None:
        self._done += 1
        self._tokens += sum(len(each.token_ids) for each in output.outputs)
        self._show(self._done, self._tokens)


@contextmanager
def progress(num_requests: int, is_wanted: bool) -> Iterator[Report]:
    """Show a progress bar with the finished requests and the tokens per second. The bar appears in a notebook, or on
    stderr if stderr is a terminal. The bar is removed at the end."""
    from rich.console import Console

    console = Console(stderr=True)
    if is_wanted and num_requests and notebook.in_notebook():
        bar = notebook.ProgressBar(num_requests)
        try:
            yield _Count(bar.update).report
        finally:
            bar.close()
    elif is_wanted and num_requests and console.is_terminal:
        with _terminal_bar(console, num_requests) as show:
            yield _Count(show).report
    else:
        yield lambda output: None


@contextmanager
def _terminal_bar(console: Console, num_requests: int) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[speed]:.0f} tokens/s")
    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=num_requests, speed=0.0)

        def show(num_done: int, num_tokens: int) -> None:
            elapsed = bar.tasks[task].elapsed
            bar.update(task, completed=num_done, speed=num_tokens / elapsed if elapsed else 0.0)

        yield show
