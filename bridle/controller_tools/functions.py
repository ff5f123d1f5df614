"""Python functions as tools of an operator, or of the program that loads a model.

A function that is `async` runs on the executor's event loop and can be stopped; any other function gets a thread of its
own. A thread cannot be stopped: after a cancelled call it continues, and its result is dropped. So the number of
threads is limited.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from bridle.controller_tools.executor import Arguments, Tool
from bridle.controller_tools.limits import DEFAULT_LIMITS, ToolLimits
from bridle.controller_tools.offer import ToolOffer, schema_of
from bridle.errors import InvalidRequest, ToolFailed
from bridle.safe_repr import short_repr
from bridle.threads import start_thread

_MAX_DESCRIPTION_CHARS = 300

T = TypeVar("T")


class Threads:
    """A limit on the number of threads of tool functions. Safe from any thread."""

    def __init__(self, most: int) -> None:
        self.most, self.num = most, 0
        self._lock = threading.Lock()

    def start(self, function: Callable[[], T], name: str) -> Future[T]:
        """Run a function in a thread of its own. The thread counts until the function has returned, or until the call
        was cancelled before it began. Raises `ToolFailed` if there are too many threads."""
        self._take()
        try:
            future = start_thread(function, name[:40])
        except RuntimeError as error:  # the system starts no more threads
            self._give_back()
            raise ToolFailed(f"the system started no thread for the function: {error}") from None
        future.add_done_callback(lambda done: self._give_back())
        return future

    def _take(self) -> None:
        with self._lock:
            if self.num >= self.most:
                raise ToolFailed(f"{self.num} tool functions are running; at most {self.most} may run (max_threads)")
            self.num += 1

    def _give_back(self) -> None:
        with self._lock:
            self.num -= 1


class FunctionTool:
    """A function as a tool. The function is called with the arguments as keywords. If it returns a string, this is the
    answer; any other result is converted to JSON."""

    def __init__(self, function: Callable[..., Any], name: str, threads: Threads) -> None:
        if not callable(function):
            raise InvalidRequest(f"tools: {name!r} is {short_repr(function)}; each value must be a function", "tools")
        self._function, self._name, self._threads = function, name, threads
        self._is_async = inspect.iscoroutinefunction(function)

    @property
    def description(self) -> str:
        """Return the first line of the function's documentation."""
        return (inspect.getdoc(self._function) or "").partition("\n")[0][:_MAX_DESCRIPTION_CHARS]

    async def offers(self) -> list[ToolOffer]:
        """Return the description of the function and its parameters."""
        return [ToolOffer(self._name, self.description, schema_of(self._function))]

    async def call(self, member: str, arguments: Arguments) -> str:
        """Call the function, and wait for its result."""
        if member:
            raise ToolFailed(f"a function has no member {short_repr(member)}")
        try:
            inspect.signature(self._function).bind(**arguments)
        except ValueError:  # a function without a signature, such as some built-in ones
            pass
        except TypeError as error:
            raise ToolFailed(f"the arguments do not fit the function: {error}") from None
        try:
            result = await (self._function(**arguments) if self._is_async else self._in_thread(arguments))
        except ToolFailed:
            raise
        except Exception as error:
            raise ToolFailed(f"raised {error!r}") from error
        return as_text(result)

    async def _in_thread(self, arguments: Arguments) -> Any:
        def run() -> Any:
            try:
                return self._function(**arguments)
            except Exception:
                raise
            except BaseException as error:  # an exception must not end the executor's loop
                raise ToolFailed(f"raised {error!r}") from None

        return await asyncio.wrap_future(self._threads.start(run, f"bridle-tool-{self._name}"))

    async def close(self) -> None:
        """Do nothing, because a function has no resources."""


def as_text(result: Any) -> str:
    """Return a function's result as text."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailed(f"returned {type(result).__name__}, which is neither a string nor JSON: {error}") from None


def function_tools(functions: Mapping[str, Callable[..., Any]], limits: ToolLimits = DEFAULT_LIMITS) -> dict[str, Tool]:
    """Return functions as tools, by the same names."""
    threads = Threads(limits.max_threads)
    return {name: FunctionTool(function, name, threads) for name, function in functions.items()}
