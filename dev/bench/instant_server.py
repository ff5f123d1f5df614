"""Runs `bridle serve` over a device that computes nothing. So only the front end and the engine's own Python code use
processor time.

    python -m dev.bench.instant_server SECONDS FRONT_ENDS

Each step lasts SECONDS, in which the device's thread sleeps like a thread that waits for a GPU. FRONT_ENDS processes
write streams.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from bridle.bench.control_device import TimedDevice
from bridle.config import EngineConfig
from bridle.engine import AsyncEngine, Engine
from bridle.http.server.run import serve
from bridle.http.settings import ServeSettings
from bridle.lmtp.server import LmtpSettings, websocket_front
from bridle.model import resolve_model
from bridle.serving import LoadedModel
from bridle.tokenizer import Detokenizer, Tokenizer

_MAX_SEQS, _MAX_TOKENS = 256, 4096


class WritingDevice(TimedDevice):
    """A fake device that takes a fixed time per step and always samples the same token, which has a text."""

    def __init__(self, seconds: float, token: int, vocab_size: int) -> None:
        super().__init__(_MAX_SEQS, _MAX_TOKENS, seconds, blocks=True)
        self._token = token
        self.info = replace(self.info, vocab_size=vocab_size)


def instant_engine(seconds: float) -> tuple[AsyncEngine, Tokenizer]:
    """Return a running engine whose steps take `seconds`, and its tokenizer."""
    tokenizer = Tokenizer.load(str(resolve_model("demo")))
    token = tokenizer.encode_inside(" and")[0]
    device = WritingDevice(seconds, token, tokenizer.vocab_size)
    engine = Engine(device, EngineConfig(), decoder=Detokenizer(tokenizer))
    return AsyncEngine(engine).start(), tokenizer


def main() -> None:
    """Serve until a signal comes."""
    seconds, front_ends = float(sys.argv[1]), int(sys.argv[2])
    client, tokenizer = instant_engine(seconds)

    def load(settings: ServeSettings) -> LoadedModel:
        return LoadedModel("instant", client, tokenizer, shutdown=client.close)

    settings = ServeSettings(port=0, log_format="json", log_level="warning", front_ends=front_ends)
    serve(settings, load, [websocket_front(LmtpSettings())])


if __name__ == "__main__":
    main()
