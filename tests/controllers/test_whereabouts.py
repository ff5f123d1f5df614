"""Tests that the error of an endless script has its line and function, in JavaScript and Python."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.aici.runtime.linear_memory import LinearMemory, Unreadable
from bridle.aici.runtime.python_frames import line_at, whereabouts
from tests.aici.conftest import VOCAB_SIZE, tokenizer  # noqa: F401 -- a fixture
from tests.controllers.conftest import Run, named
from tests.sources import ROOT


@pytest.fixture(scope="module")
def hurried(tokenizer: Path, py_store: Path) -> Iterator[RuntimePool]:  # noqa: F811
    """Yield a runtime that ends a callback by its processor time, and tolerates late answers."""
    arguments = ["--store", str(py_store), "--wasm-max-step-time", "50", "--wasm-max-timeout-steps", "100000"]
    for limit in ("max_prepare_wait=800000", "max_init_time=1000", "max_call_time=300"):
        arguments += ["--limit", limit]
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=tuple(arguments)), VOCAB_SIZE)
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def js_hurried(hurried: RuntimePool) -> Run:
    return named(hurried, "jsctrl")


@pytest.fixture(scope="module")
def py_hurried(hurried: RuntimePool) -> Run:
    return named(hurried, "pyctrl")


#: Scripts, and the lines where they may be found: functions with their lines, the innermost first.
JS: dict[str, tuple[str, str]] = {
    "loop": (
        """
        function spin() {
          let n = 0
          for (;;) {
            n++
          }
        }
        async function main() {
          spin()
        }
        start(main)
        """,
        "at spin (main:4:5)\n    at main (main:8:3)",
    ),
    "nothing catches it": (
        """
        async function main() {
          try {
            for (;;) {}
          } catch {
            console.log("caught")
          } finally {
            for (;;) {}
          }
        }
        start(main)
        """,
        "at main (main:3:",
    ),
    "while it is read": ("let n = 0\nwhile (true) n++", "at <anonymous> (main:2:"),
    "after a step": (
        """
        start(async function main() {
          await gen({ maxTokens: 1 })
          let n = 0
          do {
            n++
          } while (n > 0)
        })
        """,
        "at main (main:5:",
    ),
    "in a regular expression": ("start(() => {\n  /(a+)+$/.exec('a'.repeat(50) + 'b')\n})", "at <anonymous> (main:2:"),
    "in a getter": (
        "class A {\n  get b() {\n    while (1);\n  }\n}\nstart(() => new A().b)",
        "at get b (main:3:11)\n    at <anonymous> (main:6:",
    ),
    "in calls": ("const f = (n) =>\n  n < 2 ? n : f(n - 1) + f(n - 2)\nstart(() => f(60))", "at f (main:2:"),
    "in the library": ("start(async () => {\n  for (;;) await gen({ maxTokens: 0 })\n})", ""),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", JS)
def test_a_script_in_javascript(js_hurried: Run, name: str) -> None:
    source, expected = JS[name]
    error = js_hurried(textwrap.dedent(source).strip(), "abc").error()
    assert "ms of CPU time\n    at " in error or not expected, error
    assert expected in error and "wasm backtrace" not in error and "aici/" not in error, error


PY: dict[str, tuple[str, list[str]]] = {
    "loop": (
        """
        import pyaici.server as aici
        def spin(step):
            n = 0
            while True: n += step
        async def main():
            spin(1)
        aici.start(main())
        """,
        ["line 6, in main", "line 4, in spin"],
    ),
    "nothing catches it": (
        """
        import pyaici.server as aici
        async def main():
            try:
                while True: pass
            finally:
                while True: pass
        aici.start(main())
        """,
        ["line 4, in main"],
    ),
    "while it is read": ("n = 0\n\nwhile True: n += 1", ["line 3, in <module>"]),
    "after a step": (
        """
        import pyaici.server as aici
        class Größe:
            def messen(self):
                while True: self
        async def main():
            await aici.gen_tokens(max_tokens=1)
            Größe().messen()
        aici.start(main())
        """,
        ["line 7, in main", "line 4, in Größe.messen"],
    ),
    "in C": ("import re\n\nre.match('(a+)+$', 'a' * 50 + 'b')", ["line 3, in <module>"]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PY)
def test_a_script_in_python(py_hurried: Run, name: str) -> None:
    source, expected = PY[name]
    error = py_hurried(textwrap.dedent(source).strip(), "abc").error()
    told = [line.strip().removeprefix('File "script.py", ') for line in error.splitlines() if "File " in line]
    assert "ms of CPU time" in error.splitlines()[0] and told == expected, error
    assert "wasm backtrace" not in error and "pyaici" not in error


def test_a_deep_recursion_is_cut(py_hurried: Run) -> None:
    error = py_hurried("def f(n):\n    while n > 90: pass\n    f(n + 1)\nf(0)").error()
    assert error.count("line 3, in f") < 20 and "more" in error and "line 2, in f" in error, error


def test_who_is_late_is_told_the_line(tokenizer: Path, py_store: Path) -> None:  # noqa: F811
    """A script that is ended for too many late answers also gets an error with its line."""
    arguments = ["--store", str(py_store), "--wasm-max-step-time", "50", "--wasm-max-timeout-steps", "4"]
    arguments += ["--limit", "max_prepare_wait=800000", "--limit", "max_init_time=10000"]
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=tuple(arguments)), VOCAB_SIZE)
    try:
        script = "start(async function main() {\n  await gen({ maxTokens: 1 })\n  for (;;);\n})"
        error = named(pool, "jsctrl")(script, "abc").error()
        assert "step limit for 4 steps" in error and "at main (main:3:" in error, error
        script = "import pyaici.server as aici\nasync def main():\n    await aici.gen_tokens(max_tokens=1)\n"
        error = named(pool, "pyctrl")(script + "    while True: pass\naici.start(main())", "abc").error()
        assert "step limit for 4 steps" in error and 'File "script.py", line 4, in main' in error, error
    finally:
        pool.shutdown()


# -- reading from outside ----------------------------------------------------------------------------------


def test_a_process_without_guests_has_no_lines() -> None:
    assert whereabouts() == ""


def test_nothing_is_read_outside_of_a_memory() -> None:
    with open("/proc/self/mem", "rb") as file:
        memory = LinearMemory(0, 1 << 16, file.fileno())  # nobody may touch the first page of a process
        for start, length in ((0, 8), (-8, 8), (1 << 16, 1), ((1 << 16) - 4, 8)):
            with pytest.raises(Unreadable):
                memory.read(start, length)


@given(st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_lines_are_those_that_the_interpreter_knows(before: int, inside: int, is_async: bool) -> None:
    """Line numbers are computed from a code object's line table, and compared with Python's own."""
    head = "async def f(x):\n" if is_async else "def f(x):\n"
    source = (
        "\n" * before + head + "\n" * inside + "    for y in x:\n        y.z(\n        1)\n    return [w for w in x]\n"
    )
    scope: dict[str, object] = {}
    exec(compile(source, "made", "exec"), scope)
    code = scope["f"].__code__  # type: ignore[attr-defined]
    for start, end, line in code.co_lines():
        if line is not None:
            assert all(line_at(code.co_linetable, code.co_firstlineno, at) == line for at in range(start, end, 2))


def test_a_forked_process_does_not_look_into_its_parent() -> None:
    """A forked process reads its own memory, not that of its parent; if the sandbox forbids reading, it reads none."""
    code = """
import os
from bridle import os_sandbox
from bridle.aici.runtime.own_memory import own_memory
from bridle.aici.runtime.python_frames import whereabouts
parent = own_memory()
if not (pid := os.fork()):
    assert own_memory().pid == os.getpid() != parent.pid
    assert own_memory().mappings()
    os_sandbox.enter(may_fork=True)
    assert own_memory().mappings(), "it was opened before"
    if not (copy := os.fork()):
        assert whereabouts() == ""
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
