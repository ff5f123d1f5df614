"""An engine with a scripted model and a real control runtime, for tests of the engine's side of the protocol."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable

from bridle.aici import protocol, replies
from bridle.aici.client import RuntimePool, WasmController
from bridle.config import EngineConfig
from bridle.engine import Engine, Request
from bridle.engine.interfaces import DelegatingPool
from bridle.outputs import Event, Finished, Forked, Log, Rewind, TokenEvent
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.aici.conftest import EOS, VOCAB_SIZE
from tests.waiting import PATIENCE


class Steered:
    """An engine with the controller pool, and the events of each request."""

    def __init__(self, pool: RuntimePool, *, num_blocks: int = 256, **limits: object) -> None:
        self.pool = pool
        executor = ScriptedExecutor(VOCAB_SIZE, num_blocks, 4, eos_token_ids=(EOS,))
        config = EngineConfig(**{"step_timeout": 2.0, **limits})  # type: ignore[arg-type]
        self.engine = Engine(executor, config, pools=[SharedRuntime(pool)])
        self.events: dict[str, list[Event]] = {}

    def upload(self, wasm: bytes) -> str:
        message = protocol.MkModule(binary=base64.b64encode(wasm).decode())
        module: str = self.pool.call(message, replies.ModuleData).module_id
        return module

    def add(self, name: str, wasm: bytes | None, argument: str = "", **sampling: object) -> None:
        """Start a request with a `prompt` and sampling parameters."""
        self.add_module(name, None if wasm is None else self.upload(wasm), argument, **sampling)

    def add_module(self, name: str, module: str | None, argument: str = "", **sampling: object) -> None:
        controller = None if module is None else WasmController(module, argument)
        prompt: tuple[int, ...] = sampling.pop("prompt", (1, 2, 3))  # type: ignore[assignment]
        params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        self.engine.add(Request(name, prompt, params, controller=controller))
        self.events[name] = []

    def step(self) -> None:
        for event in self.engine.step():
            self.events[event.request_id].append(event)
        self.engine.check_integrity()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run steps until all requests have ended, or until `until` is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if not self.engine.has_work:
                self.pool.settle()  # the next engine on it numbers its sequences from 0 again
                return
            if until():
                return
            self.step()
            if self.engine.is_stalled:
                time.sleep(0.001)  # a controller is being made, on a machine that may be busy
        raise AssertionError(f"not finished after {PATIENCE:g} seconds")

    def is_over(self, name: str) -> bool:
        return any(isinstance(event, Finished) and event.is_last for event in self.events[name])

    def tokens(self, name: str, index: int = 0) -> list[int]:
        """Return the tokens of an output after its rollbacks and forks."""
        outputs: dict[int, list[int]] = {0: []}
        for event in self.events[name]:
            if isinstance(event, TokenEvent):
                outputs[event.index].append(event.token)
            elif isinstance(event, Rewind):
                del outputs[event.index][len(outputs[event.index]) - event.num_tokens :]
            elif isinstance(event, Forked):
                outputs[event.index] = outputs[event.parent][: event.num_tokens]
        return outputs[index]

    def end(self, name: str, index: int = 0) -> Finished:
        return next(e for e in self.events[name] if isinstance(e, Finished) and e.index == index)

    def logs(self, name: str, index: int = 0) -> str:
        return "".join(e.text for e in self.events[name] if isinstance(e, Log) and e.index == index)


class SharedRuntime(DelegatingPool):
    """The controller pool of a test module, which is used by the engine of each test."""

    def shutdown(self) -> None:
        pass
