"""The tool of the recipe `code.py`: runs the examples in the docstrings of a program, in a restricted process.

    python examples/recipes/interpreter.py < PROGRAM

Examples are doctests, or lines such as `last_two("abc") == "bc"`, `=> "bc"` or `returns "bc"`.

The process has two seconds of processor time and 512 MB. Before it compiles the program, it gives up access to files,
the network and other programs (Linux: Landlock and seccomp).
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import json
import re
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from bridle import os_sandbox

_SECONDS, _PATIENCE, _MEMORY = 2, 30, 512 << 20
_NAME = "<program>"
#: The text between a call and its result in a line that is not a doctest, and the text that may follow the result.
_GIVES = re.compile(r"\s*(?:==?>?|➞|[-=]+>|returns?|should (?:return|be))\s*(.+?)\s*[.,;]?\s*(?:#.*)?")
_WORDS = {"true": True, "false": False, "null": None}


def run(code: str) -> dict[str, Any]:
    """Return the first error of a program or its examples, and the program's line where the error occurred, if there is
    one."""
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return {"error": "it ran for too long or was ended", "line": None}


def outcome(code: str) -> dict[str, Any]:
    """Return the same result as `run`, but compute it in this process."""
    space: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(code, _NAME, "exec"), space)  # the process is sandboxed
    except SyntaxError as error:
        return {"error": str(error), "line": error.lineno}
    except BaseException as error:
        return _failure(error)
    own = [each for each in list(space.values()) if callable(each) and getattr(each, "__module__", None) == "program"]
    return _doctests(own, space) or _plain_examples(own) or {"error": None, "line": None}


class Checker(doctest.OutputChecker):
    """Compares literal values instead of their texts. An example that states no result may be a comparison, which must
    be true."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if super().check_output(want or "True\n", got, optionflags) or want == got:
            return True
        with contextlib.suppress(ValueError, SyntaxError):
            return bool(ast.literal_eval(want) == ast.literal_eval(got))
        return False


def _doctests(functions: list[Callable[..., Any]], space: dict[str, Any]) -> dict[str, Any] | None:
    """Return the failure of the first doctest that fails."""
    runner = doctest.DocTestRunner(Checker(), verbose=False, optionflags=doctest.FAIL_FAST)
    runner.report_start = lambda *_: None  # type: ignore[method-assign]
    failures: list[dict[str, Any]] = []
    runner.report_failure = lambda out, test, example, got: failures.append(  # type: ignore[method-assign]
        _difference(example.source.strip(), got.strip(), example.want.strip() or "True")
    )
    runner.report_unexpected_exception = lambda out, test, example, exc_info: failures.append(  # type: ignore[method-assign]
        _failure(exc_info[1])
    )
    finder = doctest.DocTestFinder(recurse=False)
    for each in functions:
        with contextlib.suppress(ValueError):  # a docstring with lines that are not valid doctests
            for test in finder.find(each, each.__name__, globs=space, module=False) if each.__doc__ else ():
                runner.run(test)
    return failures[0] if failures else None


def _plain_examples(functions: list[Callable[..., Any]]) -> dict[str, Any] | None:
    """Return the failure of the first line that shows a call and another result than the function's."""
    for each in functions:
        for call, given, wanted in plain_examples(each.__name__, each.__doc__ or ""):
            try:
                got = each(*given)
            except BaseException as error:
                return _failure(error)
            if got != wanted:
                return _difference(call, repr(got), repr(wanted))
    return None


def plain_examples(name: str, text: str) -> Iterator[tuple[str, list[Any], Any]]:
    """Yield each call of a function in a text, with its arguments and its expected result. Calls count only if all
    their values are literals."""
    for line in text.splitlines():
        begin = -1 if ">>>" in line else line.find(f"{name}(")
        for end in (at + 1 for at, char in enumerate(line) if begin >= 0 and char == ")" and at > begin):
            given, found = _arguments(line[begin:end]), _GIVES.fullmatch(line[end:])
            if given is not None and found:
                with contextlib.suppress(ValueError, SyntaxError):
                    yield line[begin:end], given, _literal(found[1])
                break


def _arguments(call: str) -> list[Any] | None:
    """Return the arguments of a call if all of them are literals."""
    with contextlib.suppress(ValueError, SyntaxError):
        parsed = ast.parse(call, mode="eval").body
        if isinstance(parsed, ast.Call) and not parsed.keywords:
            return [ast.literal_eval(each) for each in parsed.args]
    return None


def _literal(text: str) -> Any:
    return _WORDS[text] if text in _WORDS else ast.literal_eval(text)


def _difference(call: str, got: str, wanted: str) -> dict[str, Any]:
    return {"error": f"{call} gave {got}, not {wanted}"[:300], "line": None}


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the error, with the last line of the program that its traceback contains."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _NAME]
    return {"error": f"{type(error).__name__}: {error}"[:300], "line": lines[-1] if lines else None}


if __name__ == "__main__":
    text = sys.stdin.read()
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os_sandbox.enter()
    result = outcome(text)
    print("\n" + json.dumps(result))
