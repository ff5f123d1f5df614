"""The user's program: run it, and say where it went wrong in its own terms."""

from __future__ import annotations

import linecache
import sys
import traceback
import types

from pyaici import driver

#: What a script is called in tracebacks.
NAME = "script.py"
#: How much of an error is told: of its traceback, of its last line, and of what led to it.
_MAX_TRACEBACK = 8000
_MAX_SUMMARY = 1000
_MAX_CHAIN = 20


class Failed(Exception):
    """What to tell the user."""


def run(source: str) -> None:
    """Run a script to its end; it registers its controller on the way."""
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    module = types.ModuleType("__main__")
    module.__file__ = NAME
    sys.modules["__main__"] = module
    exec(compile(source, NAME, "exec"), module.__dict__)  # noqa: S102 -- this is what the sandbox is for
    driver.registered()


def explain(error: BaseException) -> Failed:
    """Print a traceback of the script's lines; gives its essence."""
    told = traceback.TracebackException.from_exception(error)
    _leave_only_script(told)
    text = "".join(told.format())
    if len(text) > _MAX_TRACEBACK:
        text = text[: _MAX_TRACEBACK // 2] + "\n...\n" + text[-_MAX_TRACEBACK // 2 :]
    sys.stderr.write(text)
    what = list(told.format_exception_only())[-1].strip()[:_MAX_SUMMARY]
    line = getattr(told, "lineno", None) or (told.stack[-1].lineno if told.stack else None)
    return Failed(f"{NAME}, line {line}: {what}" if line else what)


def _leave_only_script(told: traceback.TracebackException, depth: int = 0) -> None:
    """Without the frames of library and driver, here and in what led to it."""
    told.stack[:] = [frame for frame in told.stack if frame.filename == NAME]
    for other in (told.__cause__, told.__context__):
        if other is not None and depth < _MAX_CHAIN:
            _leave_only_script(other, depth + 1)
