"""Tests that a script with an error or with bad intent ends alone, and that its error names the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool
from tests.aici.conftest import VOCAB_SIZE, tokenizer  # noqa: F401 -- a fixture
from tests.controllers.conftest import Run, named
from tests.controllers.pykit import PRELUDE, script

SKIP = "class Skip(aici.NextToken):\n    def mid_process(self): return aici.MidProcessResult.skip()\n"


def test_a_traceback_shows_the_scripts_lines(py: Run) -> None:
    ran = py(
        """import pyaici.server as aici

def half(x):
    return x / 0  # wrong

async def main():
    await aici.FixedTokens("a")
    half(1)

aici.start(main())
"""
    )
    assert ran.error() == "script.py, line 4: ZeroDivisionError: division by zero"
    assert ran.text() == "a" and ran.logs("a").splitlines() == [
        "FIXED 'a'",
        "Traceback (most recent call last):",
        '  File "script.py", line 8, in main',
        "    half(1)",
        "    ~~~~^^^",
        '  File "script.py", line 4, in half',
        "    return x / 0  # wrong",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]


def test_an_error_of_a_step_is_raised_where_the_script_awaits_it(py: Run) -> None:
    body = """
try:
    await aici.gen_text(regex="(")
except ValueError:
    print("caught")
await aici.gen_text(json_schema={"type": "strnig"})
"""
    ran = py(script(body))
    assert ran.error().startswith("script.py, line 9: ValueError:") and "strnig" in ran.error()
    assert ran.logs("a").startswith("caught\n") and 'await aici.gen_text(json_schema={"type": "strnig"})' in ran.logs(
        "a"
    )


AT_START = [
    ("x = (1", "line 1: SyntaxError: '(' was never closed"),
    ("print(1)", "without a call of aici.start"),
    ("import socket", "No module named 'socket': the sandbox"),
    ("import threading", "No module named 'threading'"),
    ("open('/etc/passwd')", "PermissionError: a script has no files"),
    ("import os\nos.listdir('/')", "line 2: FileNotFoundError"),
    ("import os\nos.open('x', os.O_CREAT)", "line 2: "),
    ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
    ("import time\ntime.sleep(5)", "line 2: RuntimeError: a script must not keep others waiting"),
    ("__import__('ctypes')", "No module named 'ctypes'"),
    (PRELUDE + "async def main(): pass\naici.start(main())\naici.start(main())", "line 6: RuntimeError"),
    (PRELUDE + "aici.start(3)", "TypeError: start wants a coroutine"),
    ("x = 'x' * 10**9", "MemoryError"),
    ("def f(): f()\nf()", "RecursionError"),
    ("x = []\nfor _ in range(10**5): x = [x]\nrepr(x)", ""),
    ("class A:\n def __getattr__(self, n): return getattr(self, n + 'a')\nA().b", ""),
]


@pytest.mark.parametrize(("source", "expected"), AT_START, ids=[s.splitlines()[-1][:40] for s, _ in AT_START])
def test_faults_while_the_script_is_read(py: Run, source: str, expected: str) -> None:
    error = py(source).error()
    assert error and expected in error, error


IN_STEPS = [
    ("while True:\n    await aici.MidProcessResult.skip()", "line 6: TypeError"),
    ("held = []\nwhile True:\n    held.append('x' * 10**6)", "line 7: MemoryError"),
    ("raise SystemExit", "line 5: SystemExit"),
    ("raise KeyboardInterrupt", "line 5: KeyboardInterrupt"),
    ("await 3", "line 5: TypeError"),
    ("await aici.gen_text(temprature=1)", "line 5: TypeError: unknown parameter 'temprature'"),
    ("await aici.gen_text(temperature=-1)", "temperature"),
    ("await aici.gen_text(top_p=7)", "top_p"),
    ("await aici.candidates(1000)", "top_logprobs"),
    ("await aici.FixedTokens(3)", "line 5: TypeError"),
    ("aici.set_var('x' * 1000, 'y')", "name"),
    ("for i in range(1000):\n    aici.set_var(f'x{i}', 'y')", "storage commands"),
    ("kept = [aici.RegexConstraint('a') for _ in range(100)]", "constraints"),
    ("label = aici.Label()\nlabel.ptr = 99\nawait aici.FixedTokens('x', following=label)", "line 7: ValueError"),
    ("await aici.FixedTokens('x' * 20000)", "limit"),
]


@pytest.mark.parametrize(("body", "expected"), IN_STEPS, ids=[body.splitlines()[-1][:40] for body, _ in IN_STEPS])
def test_a_fault_in_a_step_ends_with_its_reason(py: Run, body: str, expected: str) -> None:
    ran = py(script(body))
    assert ran.error() and expected in ran.error() + ran.logs("a"), ran.error()


@pytest.fixture(scope="module")
def hurried(tokenizer: Path, py_store: Path) -> Iterator[Run]:  # noqa: F811
    """Yield a function that runs scripts in a runtime with short time limits."""
    arguments = ["--store", str(py_store), "--wasm-max-step-time", "50", "--wasm-max-timeout-steps", "4"]
    limits = ("max_prepare_wait=800000", "max_init_time=1000", "max_call_time=500")
    arguments += [word for limit in limits for word in ("--limit", limit)]
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=tuple(arguments)), VOCAB_SIZE)
    yield named(pool, "pyctrl")
    pool.shutdown()


ENDLESS = [
    "while True: pass",
    "import re\nre.match('(a+)+$', 'a' * 50 + 'b')",
    script("while True:\n    pass"),
    script("while True:\n    await Skip()").replace("async def", SKIP + "async def"),
    script("await aici.Noop()\nwhile True:\n    pass"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("source", ENDLESS, ids=["read", "regex", "start", "skips", "step"])
def test_what_does_not_end_is_ended(hurried: Run, source: str) -> None:
    error = hurried(source).error()
    assert "CPU time" in error or "did not answer within the step limit" in error, error


def test_much_output_is_cut_and_kept_in_order(py: Run) -> None:
    ran = py(script("for i in range(30000):\n    print(i)"))
    lines = ran.logs("a").splitlines()
    assert ran.error() == "" and lines[-1] == "29999" and len(ran.logs("a")) <= 70_000


def test_output_that_is_no_text_and_lines_that_do_not_end(py: Run) -> None:
    ran = py(script("print('a', end='')\nprint('\\ud800', end='')\nimport sys\nprint('b', file=sys.stderr, end='')"))
    assert (ran.error(), ran.logs("a")) == ("", "a?b")


def test_many_texts_in_a_row_reach_the_model_in_pieces(py: Run) -> None:
    """A script that forces text without end is stopped by the limit of the output's length, not by a time limit."""
    ran = py(script("while True:\n    await aici.FixedTokens('abcdefgh' * 10)"), max_tokens=300)
    assert ran.error() == "" and ran.text() == ("abcdefgh" * 40)[:300]
