"""A server process for tests of signals: a real engine over scripted bytes, slow until a line comes on standard input.

Arguments: the grace period in seconds, and for HTTPS the files of a certificate and its key, or else one of policies.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path
from typing import Any

from bridle.engine import AsyncEngine, Engine
from bridle.http import HttpSettings, ServeSettings, serve
from bridle.http.server.tls import TlsFiles
from bridle.serving import LoadedModel
from bridle.serving.policies import PolicyRegistry
from bridle.testing.scripted import ScriptedExecutor
from bridle.testing.text import PieceDecoder
from tests.serving.fakes import ByteTokenizer

STEP_SECONDS = 0.1
_is_slow = True


def slow_step(plan: Any) -> None:
    """A step takes its time, or ends early when the parent says so."""
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
    files = [Path(name) for name in sys.argv[2:]]
    tls = TlsFiles(*files) if len(files) == 2 else None
    http = HttpSettings(policies=PolicyRegistry(files[0]) if len(files) == 1 else None)
    serve(ServeSettings(port=0, grace_period=float(sys.argv[1]), log_format="json", tls=tls, http=http), load)
