"""Runs Python scripts in the sandbox, over a fake model that has memorized some lines.

`Parrot` continues the text with the line that contains the longest end of the text so far. So a test states in plain
text what the model would write, and sees what a script makes of it."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bridle.aici.client import RuntimePool
from bridle.config import EngineConfig
from bridle.engine import Engine
from bridle.outputs import FinishReason, Stored
from bridle.testing.scripted import ScriptedExecutor
from tests.aici.conftest import BOS, EOS, HE, LL, VOCAB_SIZE
from tests.aici.steering import SharedRuntime, Steered

#: Bytes of the tokens of the test tokenizer that are more than one byte, or none.
_BYTES = {HE: b"he", LL: b"ll", EOS: b"", BOS: b""}


def text_of(tokens: Iterable[int]) -> str:
    """Return the text of tokens of the test tokenizer."""
    return b"".join(_BYTES.get(token, bytes([token & 0xFF])) for token in tokens).decode(errors="replace")


@dataclass
class Parrot:
    """A fake model that continues a text as its lines do, and ends the text after a line's last byte or if no line
    matches."""

    lines: tuple[str, ...]

    def __call__(self, prefix: tuple[int, ...]) -> int:
        text = text_of(prefix)
        best, following = 0, EOS
        for line in self.lines:
            for end in range(len(line) + 1):
                size = _common_end(text, line[:end])
                if size > best:
                    best, following = size, ord(line[end]) if end < len(line) else EOS
        return following


def _common_end(first: str, second: str) -> int:
    size = 0
    while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    return size


class Scripts(Steered):
    """An engine over the fake model `Parrot`, whose requests are steered by scripts."""

    def __init__(self, pool: RuntimePool, module: str, lines: Iterable[str] = (), **limits: object) -> None:
        super().__init__(pool)
        self.module = module
        executor = ScriptedExecutor(
            VOCAB_SIZE, 512, 4, eos_token_ids=(EOS,), max_model_len=2000, next_token=Parrot(tuple(lines))
        )
        self.engine = Engine(executor, EngineConfig(**{"step_timeout": 20.0, **limits}), pools=[SharedRuntime(pool)])  # type: ignore[arg-type]
        self._news = threading.Event()
        pool.wake = self._news.set

    def logs(self, name: str, index: int = 0) -> str:
        """Return the script's log without the runtime's warnings about late answers, as the machine may be busy."""
        return "".join(line for line in super().logs(name, index).splitlines(True) if "⏳" not in line)

    def script(self, source: str, prompt: str = "", name: str = "a", **sampling: object) -> str:
        """Run a script to its end; return the text without the prompt."""
        tokens = (BOS, *prompt.encode())
        self.add_module(name, self.module, textwrap.dedent(source), **{"max_tokens": 500, "prompt": tokens, **sampling})
        self.run()
        return self.text(name)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run the engine until `until()` is true or no work is left; a controller may take long to start."""
        while self.engine.has_work and not until():
            self._news.clear()
            events = self.engine.step()
            for event in events:
                self.events[event.request_id].append(event)
            self.engine.check_integrity()
            if not events:
                self._news.wait(0.005)
        self.pool.settle()

    def text(self, name: str = "a", index: int = 0) -> str:
        return text_of(self.tokens(name, index))

    def error(self, name: str = "a", index: int = 0) -> str:
        """Return the error of an output; empty if it did not fail."""
        end = self.end(name, index)
        return str(end.error) if end.reason is FinishReason.ERROR else ""

    def variables(self, name: str = "a") -> dict[str, bytes]:
        """Return the variables that the script stored, with appended values joined."""
        found: dict[str, bytes] = {}
        for event in self.events[name]:
            if isinstance(event, Stored):
                found[event.name] = found.get(event.name, b"") * event.is_append + event.value
        return found


PRELUDE = "import pyaici.server as aici\nimport pyaici.server_native as native\nimport pyaici\n"


def script(body: str, *, call: str = "start") -> str:
    """Return a script that runs `body` as a coroutine."""
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    return f"{PRELUDE}async def main():\n{lines}aici.{call}(main())\n"
