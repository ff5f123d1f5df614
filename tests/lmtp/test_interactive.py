"""Tests of the interactive client: the meaning of input lines, the output, and the README's session in a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bridle.cli.lmtp import Terminal
from bridle.errors import InvalidRequest
from bridle.lmtp import Client
from bridle.lmtp.client import ClientChannel, MemoryCarrier
from bridle.lmtp.command_line import Line, parse_line
from bridle.lmtp.interactive import Interactive
from bridle.lmtp.server import LmtpServer, LocalHost, websocket_front
from bridle.serving import Admission, ModelRegistry
from tests.http.harness import NAME, saying, scripted_model, served
from tests.sources import ROOT
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Hello there", Line("Hello there")),
        ("Hello there max_tokens=5 temperature=1.2", Line("Hello there", {"max_tokens": 5, "temperature": 1.2})),
        ("a logit_bias={1: 100, 2: -3.5} x=None", Line("a", {"logit_bias": {1: 100, 2: -3.5}, "x": None})),
        ("a stop=['b c=1', \"d\"] n=True", Line("a", {"stop": ["b c=1", "d"], "n": True})),
        ("  two  spaces  k=1", Line("  two  spaces", {"k": 1})),
        ('prompt="Hello there " max_tokens=5', Line("Hello there ", {"max_tokens": 5})),
        ("prompt=[15496, 612]", Line([15496, 612])),
        ("1 + 1 = 2", Line("1 + 1 = 2")),
        ("", Line("")),
    ],
)
def test_a_typed_line_is_parsed(text: str, line: Line) -> None:
    assert parse_line(text) == line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a x=b", "'b' is not a valid value"),
        ("a x=", "is not a valid value"),
        ("a x=1 y", "'1 y' is not a valid value"),
        ("a x=__import__('os').getcwd()", "is not a valid value"),
        ("a x=" + "(" * 5000, "is not a valid value"),
        ("a x=1 x=2", "is given twice"),
        ("a model='b'", "cannot be set here"),
        ("a stream_id=1", "cannot be set here"),
        ("a prompt='b'", "no other prompt before it"),
        ("prompt=[1, 'a']", "in quotes or a list"),
    ],
)
def test_lines_that_cannot_be_read(text: str, part: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(part)):
        parse_line(text)


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda n: n not in ("model", "stream_id", "prompt")
)


@given(st.text(alphabet="abc 1.,", max_size=20), st.dictionaries(NAMES, LITERALS, max_size=3))
def test_any_literal_is_read_back(prompt: str, options: dict[str, Any]) -> None:
    line = " ".join([prompt, *(f"{name}={value!r}" for name, value in options.items())])
    assert parse_line(line) == Line(prompt.rstrip(" ") if options else line, options)


class Recorder:
    """A `Screen` that records its output."""

    def __init__(self) -> None:
        self.shown: list[tuple[Any, ...]] = []

    def begin(self, number: int, prompt: str) -> None:
        self.shown.append(("begin", number, prompt))

    def text(self, number: int, text: str) -> None:
        self.shown.append(("text", number, text))

    def token(self, number: int, token: dict[str, Any]) -> None:
        self.shown.append(("token", number, token))

    def end(self, number: int) -> None:
        self.shown.append(("end", number))

    def note(self, text: str) -> None:
        self.shown.append(("note", text))

    def ask(self) -> None:
        self.shown.append(("ask",))

    def texts(self, number: int) -> str:
        return "".join(each[2] for each in self.shown if each[:2] == ("text", number))


async def lines(*given: str) -> AsyncIterator[str]:
    for line in given:
        yield line


@pytest.fixture(scope="module")
def registry() -> Iterator[ModelRegistry]:
    registry = ModelRegistry([scripted_model(next_token=saying("General Kenobi"))])
    yield registry
    registry.close()


async def run(
    registry: ModelRegistry, *given: str, shows_tokens: bool = False, leaves_at_once: bool = False
) -> Recorder:
    server, screen = LmtpServer(LocalHost(registry, Admission())), Recorder()
    async with asyncio.timeout(PATIENCE), Client(MemoryCarrier(server.serve), NAME) as client:
        await Interactive(client, screen, shows_tokens=shows_tokens).run(lines(*given), leaves_at_once=leaves_at_once)
    await server.close()
    return screen


async def test_text_is_shown_while_it_is_generated(registry: ModelRegistry) -> None:
    screen = await run(registry, "Hello there max_tokens=40 temperature=0")
    assert screen.shown[:2] == [("ask",), ("begin", 1, "Hello there")]
    assert screen.texts(1) == "General Kenobi"
    assert sum(each[0] == "text" for each in screen.shown) > 3
    assert screen.shown[-2:] == [("end", 1), ("ask",)]


async def test_tokens_are_shown_one_by_one_then_the_text(registry: ModelRegistry) -> None:
    screen = await run(registry, "Hello there max_tokens=5", shows_tokens=True)
    tokens = [each[2] for each in screen.shown if each[0] == "token"]
    assert len(tokens) == 5 and tokens[-1]["finish_reason"] == "length"
    assert tokens[0].keys() == {"token", "stream_id", "logprob", "finish_reason", "top_logprobs", "text"}
    assert screen.texts(1) == "".join(token["text"] for token in tokens)


async def test_several_prompts_at_once_and_bad_lines_between(registry: ModelRegistry) -> None:
    screen = await run(registry, "One", "", "Two max_tokens=b", "Two foo=1", "Three x={1}", "Four", "quit", "Five")
    assert screen.texts(1) == screen.texts(3) == "General Kenobi"
    notes = [each[1] for each in screen.shown if each[0] == "note"]
    assert "max_tokens=b: 'b' is not a valid value" in notes[0]
    assert "cannot be written as JSON" in notes[1]
    assert notes[2].startswith("[2]") and "foo" in notes[2]
    assert ("begin", 4, "Five") not in screen.shown


async def test_quit_at_a_terminal_leaves_at_once() -> None:
    asked = asyncio.Event()

    async def silent(link: ClientChannel) -> None:
        while True:
            await link.receive()
            asked.set()

    async def typed() -> AsyncIterator[str]:
        yield "prompt=[1] text=False"
        await asked.wait()
        yield "quit"

    screen = Recorder()
    async with asyncio.timeout(PATIENCE), Client(MemoryCarrier(silent), NAME, plain=True) as client:
        await Interactive(client, screen).run(typed(), leaves_at_once=True)
    assert ("end", 1) in screen.shown


def test_lines_of_several_answers_do_not_mix() -> None:
    output = io.StringIO()
    screen = Terminal(Console(file=output, force_terminal=False), shows_prompt=False)
    screen.begin(1, "One")
    screen.text(1, " a")
    screen.begin(2, "Two")
    screen.text(2, " [b]")
    screen.text(1, " c")
    screen.note("note")
    screen.end(1)
    screen.text(2, "d")
    screen.end(2)
    assert output.getvalue() == "One a\n[2] Two [b]\n[1]  c\nnote\n[2] d\n"


def test_a_server_cannot_steer_the_terminal() -> None:
    output = io.StringIO()
    screen = Terminal(Console(file=output, force_terminal=False), shows_prompt=False)
    screen.begin(1, "")
    screen.text(1, "a\x1b[2J\x9bm b\n")
    screen.note("\x1b]0;title\x07")
    assert output.getvalue() == "a\ufffd[2J\ufffdm b\n\n\ufffd]0;title\ufffd\n"


def test_the_session_of_the_readme_at_a_terminal() -> None:
    model = scripted_model(next_token=saying(" General Kenobi"))
    with served(model, fronts=[websocket_front()]) as url:
        main, child = pty.openpty()
        command = [sys.executable, "-m", "bridle", "lmtp", NAME, url.removeprefix("http://")]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=child, stdout=child, stderr=child) as process:
            os.close(child)
            read_until(main, ">>>> ")
            os.write(main, b"Hello there max_tokens=5 temperature=0\n")
            answer = read_until(main, ">>>> ")
            os.write(main, b"quit\n")
            assert process.wait(PATIENCE) == 0
        os.close(main)
    assert "\x1b[32m" in answer  # in color
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", answer)
    assert "Hello there Gen" in plain


def read_until(descriptor: int, end: str) -> str:
    """Return a terminal's new output, up to the text `end`."""
    shown = ""
    while not shown.endswith(end):
        shown += os.read(descriptor, 1024).decode(errors="replace")
    return shown
