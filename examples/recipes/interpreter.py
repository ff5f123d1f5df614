"""The tool of `code.py`: runs the examples in the docstrings of a program, in a process that can do little else.

    python examples/recipes/interpreter.py < PROGRAM

The process has two seconds of processor time and 512 MB. Before it compiles the program it gives up files, the network
and other programs (Linux: Landlock and seccomp).
"""

from __future__ import annotations

import doctest
import json
import resource
import subprocess
import sys
import traceback
from typing import Any

from bridle import os_sandbox

_SECONDS, _PATIENCE, _MEMORY = 2, 30, 512 << 20
_NAME = "<program>"


def run(code: str) -> dict[str, Any]:
    """The first error of a program and its examples, and the line of the program where it occurred, if it has one."""
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return {"error": "it ran for too long or was ended", "line": None}


def outcome(code: str) -> dict[str, Any]:
    """The result of `run`, in this process."""
    space: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(code, _NAME, "exec"), space)  # the process has no way out
    except SyntaxError as error:
        return {"error": str(error), "line": error.lineno}
    except BaseException as error:
        return _failure(error)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.FAIL_FAST)
    runner.report_start = lambda *_: None  # type: ignore[method-assign]
    failures: list[dict[str, Any]] = []
    runner.report_failure = lambda out, test, example, got: failures.append(  # type: ignore[method-assign]
        {"error": f"{example.source.strip()} gave {got.strip()}, not {example.want.strip()}", "line": None}
    )
    runner.report_unexpected_exception = lambda out, test, example, exc_info: failures.append(  # type: ignore[method-assign]
        _failure(exc_info[1])
    )
    for value in list(space.values()):
        if callable(value) and getattr(value, "__doc__", None) and getattr(value, "__module__", None) == "program":
            for test in doctest.DocTestFinder(recurse=False).find(value, value.__name__, globs=space, module=False):
                runner.run(test)
    return failures[0] if failures else {"error": None, "line": None}


def _failure(error: BaseException) -> dict[str, Any]:
    """The error, with the last line of the program on the way to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _NAME]
    return {"error": f"{type(error).__name__}: {error}"[:300], "line": lines[-1] if lines else None}


if __name__ == "__main__":
    text = sys.stdin.read()
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os_sandbox.enter()
    result = outcome(text)
    print("\n" + json.dumps(result))
