"""`bridle lmtp`: sends typed prompts to an LMTP server, and shows the answers as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bridle.cli.preflight import check_models
from bridle.cli.terminal import harmless
from bridle.errors import BridleError, ConnectionLost, UnsupportedFeature

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.lmtp.interactive import Interactive
    from bridle.tokenizer import Tokenizer

_PROMPT = ">>>> "
_COLORS = ("green", "cyan", "magenta", "yellow", "blue", "red")
_CLEAR_LINE = "\r\x1b[K"


def lmtp(
    name: Annotated[str, Parameter(name="MODEL")],
    endpoint: Annotated[str, Parameter(name="HOST:PORT", show_env_var=False)] = "localhost:8080",
    /,
    *,
    tokens: Annotated[bool, Parameter(negative="")] = False,
    tokenizer: str | None = None,
) -> int:
    """Type prompts to an LMTP server, bridle's or LMQL's.

    A line is a prompt, then options, as in `Hello there max_tokens=5 temperature=1.2`; values are Python literals.
    Prompts can be typed while others are being answered. Ctrl-C stops the answers, `quit` or Ctrl-D ends the command.

    Parameters
    ----------
    name
        Name of the model on the server.
    endpoint
        Address of the server, also as a URL such as `http://any:KEY@host:8080/lmtp`.
    tokens
        Show token objects instead of text.
    tokenizer
        Folder or hub id of the tokenizer, for servers that only know tokens. Default: MODEL.
    """
    check_models(tokenizer)
    return asyncio.run(_talk(name, endpoint, tokens, tokenizer))


async def _talk(model: str, endpoint: str, shows_tokens: bool, tokenizer: str | None) -> int:
    from rich.console import Console

    from bridle.lmtp import Client
    from bridle.lmtp.interactive import Interactive

    console = Console(highlight=False, soft_wrap=True)
    is_terminal = sys.stdin.isatty()
    async with Client(endpoint, model) as client:
        try:
            knows_text = bool((await client.connect()).get("text"))
        except ConnectionLost as error:
            raise ConnectionLost(f"{error}; start `bridle serve`, or give the server's HOST:PORT") from error
        if not knows_text:
            client.tokenizer = _tokenizer(tokenizer or model)
        screen = Terminal(console, shows_prompt=is_terminal)
        session = Interactive(client, screen, shows_tokens=shows_tokens)
        screen.note(f"{model} at {endpoint}, text by {'the server' if knows_text else tokenizer or model}; quit leaves")
        with _interrupts(session, asyncio.current_task()):
            await session.run(_lines(), leaves_at_once=is_terminal)
    return 0


def _tokenizer(name: str) -> Tokenizer:
    from bridle.tokenizer import Tokenizer

    try:
        return Tokenizer.load(name)
    except BridleError as error:
        raise UnsupportedFeature(
            f"the server accepts only tokens, and {name!r} is not a tokenizer ({error}); name one with --tokenizer"
        ) from error


@contextlib.contextmanager
def _interrupts(session: Interactive, main: asyncio.Task[Any] | None) -> Any:
    """Let Ctrl-C cancel the running answers, or end the command if no answer is running."""

    def interrupted() -> None:
        if session.is_answering:
            session.stop()
        elif main is not None:
            main.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _lines() -> AsyncIterator[str]:
    """Yield the lines of standard input. A daemon thread reads the lines, so that waiting for input never delays the
    end of the program."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str | None] = asyncio.Queue()
    taken = threading.Semaphore(16)

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            for line in sys.stdin:
                taken.acquire()
                loop.call_soon_threadsafe(queue.put_nowait, line.rstrip("\r\n"))
            loop.call_soon_threadsafe(queue.put_nowait, None)

    threading.Thread(target=read, name="bridle-lmtp-input", daemon=True).start()
    while (line := await queue.get()) is not None:
        taken.release()
        yield line


class Terminal:
    """A `Screen` that prints lines. Each answer has its own color; text of another answer begins a new line."""

    def __init__(self, console: Console, *, shows_prompt: bool) -> None:
        self._console = console
        self._shows_prompt = shows_prompt
        self._current: int | None = None  # number of the answer whose line is unfinished
        self._is_asking = False
        self._open: set[int] = set()

    def begin(self, number: int, prompt: str) -> None:
        self._open.add(number)
        self._go_to(number, names=len(self._open) > 1)
        self._console.print(prompt, end="", markup=False)

    def text(self, number: int, text: str) -> None:
        if text:
            self._go_to(number)
            self._console.print(harmless(text), end="", markup=False, style=_COLORS[(number - 1) % len(_COLORS)])

    def token(self, number: int, token: dict[str, Any]) -> None:
        self._go_to(None)
        self._console.print(str(token), markup=False)

    def end(self, number: int) -> None:
        self._open.discard(number)
        if self._current == number:
            self._go_to(None)

    def note(self, text: str) -> None:
        self._go_to(None)
        self._console.print(harmless(text), markup=False, style="dim")

    def ask(self) -> None:
        self._go_to(None)
        if self._shows_prompt:
            self._is_asking = True
            self._console.print(_PROMPT, end="")

    def _go_to(self, number: int | None, *, names: bool = True) -> None:
        """Continue the unfinished line of an answer, or begin a new line. If `names` is set, a new line begins with the
        answer's number."""
        if self._is_asking:
            self._console.file.write(_CLEAR_LINE if self._console.is_terminal else "\n")
            self._is_asking = False
        if self._current == number:
            return
        if self._current is not None:
            self._console.print()
        self._current = number
        if number is not None and names:
            self._console.print(f"[{number}] ", end="", markup=False, style="dim")
