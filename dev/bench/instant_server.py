"""`bridle serve` over a device that computes nothing: what remains is the front end and the engine's own Python.

    python -m dev.bench.instant_server SECONDS

Each step takes SECONDS, in which the device's thread lets others run, as one that waits for a GPU does.
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
    """A device that takes its time and draws one token, which has a text."""

    def __init__(self, seconds: float, token: int, vocab_size: int) -> None:
        super().__init__(_MAX_SEQS, _MAX_TOKENS, seconds, blocks=True)
        self._token = token
        self.info = replace(self.info, vocab_size=vocab_size)


def main() -> None:
    """Serve until a signal comes."""
    seconds = float(sys.argv[1])
    tokenizer = Tokenizer.load(str(resolve_model("demo")))
    token = tokenizer.encode_inside(" and")[0]
    device = WritingDevice(seconds, token, tokenizer.vocab_size)
    engine = Engine(device, EngineConfig(), decoder=Detokenizer(tokenizer))
    client = AsyncEngine(engine).start()

    def load(settings: ServeSettings) -> LoadedModel:
        return LoadedModel("instant", client, tokenizer, shutdown=client.close)

    serve(ServeSettings(port=0, log_format="json", log_level="warning"), load, [websocket_front(LmtpSettings())])


if __name__ == "__main__":
    main()
