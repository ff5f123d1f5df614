"""A server process for tests of signals: a real engine over scripted bytes, slow until a line comes on standard input.

The arguments are the grace period in seconds, the number of front ends, and one or two files. Two files are a
certificate and its key; one is a policies file.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bridle.engine import AsyncEngine, Engine
from bridle.http import HttpSettings, ServeSettings, serve
from bridle.http.server.tls import TlsFiles
from bridle.serving import LoadedModel
from bridle.serving.policies import PolicyRegistry
from bridle.testing.scripted import ScriptedExecutor
from bridle.testing.text import PieceDecoder
from tests.command_server import PipedCommand
from tests.serving.fakes import ByteTokenizer

STEP_SECONDS = 0.1
_is_slow = True


def slow_step(plan: Any) -> None:
    """Wait for some time in a step, or until the parent process lets the engine run at full speed."""
    global _is_slow
    if _is_slow and select.select([sys.stdin], [], [], STEP_SECONDS)[0]:
        _is_slow = False


def load(settings: ServeSettings) -> LoadedModel:
    executor = ScriptedExecutor(
        vocab_size=256, num_blocks=512, block_size=16, next_token=lambda prefix: 97, on_forward=slow_step
    )
    engine = Engine(executor, settings.engine, decoder=PieceDecoder([bytes([i]) for i in range(256)]))
    client = AsyncEngine(engine).start()
    tokenizer: Any = ByteTokenizer()
    return LoadedModel("bytes", client, tokenizer, shutdown=client.close)


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[3:]]
    tls = TlsFiles(*files) if len(files) == 2 else None
    http = HttpSettings(policies=PolicyRegistry(files[0]) if len(files) == 1 else None)
    grace, number = float(sys.argv[1]), int(sys.argv[2])
    serve(ServeSettings(port=0, grace_period=grace, log_format="json", tls=tls, http=http, front_ends=number), load)


class Server:
    """The small server as a child process."""

    def __init__(self, process: PipedCommand) -> None:
        self.process = process
        self.banner = [_readline(process.stdout) for _ in range(3)]
        found = re.search(r"https?://[\d.:]+/", self.banner[0])
        assert found is not None, self.banner
        self.url = found.group()

    def signal_and_wait(self, number: int, event: str = "draining") -> None:
        """Send a signal, and wait until the server logs "draining" or another given event."""
        self.process.send_signal(number)
        while json.loads(_readline(self.process.stderr))["event"] != event:
            pass

    def hurry(self) -> None:
        """Let the engine run at full speed."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def _readline(stream: IO[str]) -> str:
    line = stream.readline()
    assert line, "the server ended"
    return line


@contextlib.contextmanager
def small_server(grace: float, *files: Path, front_ends: int = 1) -> Iterator[Server]:
    with PipedCommand(["-m", __name__, str(grace), str(front_ends), *map(str, files)]) as process:
        yield Server(process)
