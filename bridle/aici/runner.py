"""Runs controllers for an engine that you write yourself, with one small class.

    runner = Runner(RuntimeConfig(tokenizer="path/to/tokenizer.json"))
    module = runner.upload(wasm)
    prompt = runner.start("request-1", prompt, module, argument)
    runner.begin([Ask(0, request=Request("request-1", prompt))])  # callbacks run while you compute
    logits = model(...)
    answer = runner.finish()[0]                           # what to do with sequence 0

Asks and answers have the types of `bridle.engine`. An `Ask` reports changes of a sequence. An `Answer` has a `Decision`
of branches, each with a mask and splices. `examples/aici_transformers.py` is a complete engine in a hundred lines.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from bridle.aici import protocol, replies
from bridle.aici.client.instantiate_messages import instantiation, prompt_of
from bridle.aici.client.process import RuntimeConfig, RuntimeProcess
from bridle.aici.client.reference import WasmController
from bridle.aici.client.side_channel import SideChannel
from bridle.aici.client.supervisor import make_exchange
from bridle.engine.interfaces import Answer, Ask
from bridle.engine.request import Request
from bridle.errors import ControllerError, ControllerTimeout, ProtocolError


class Runner:
    """One runtime process and its channels. Not thread-safe, except `upload` and `set_tags`.

    `vocab_size` is the model's number of logits; by default it is the tokenizer's vocabulary size. All methods raise
    `ControllerError` when the runtime has ended, and `InvalidRequest` when a name or a module is refused.
    """

    def __init__(self, config: RuntimeConfig, vocab_size: int | None = None) -> None:
        self._process = RuntimeProcess(config)
        self.vocab_size = vocab_size or self._process.vocab_size
        self._side = SideChannel(self._process).start()
        self._exchange = make_exchange(self._process, self.vocab_size)
        self._freed: list[int] = []

    # -- modules and instances ---------------------------------------------------------------------------

    def upload(self, wasm: bytes) -> str:
        """Store and compile a controller. Returns its id."""
        message = protocol.MkModule(binary=base64.b64encode(wasm).decode())
        return self._side.call(message, replies.ModuleData).result().module_id

    def set_tags(self, module: str, tags: Sequence[str]) -> None:
        """Set these tags as names of a module."""
        auth = msgspec.to_builtins(protocol.Auth("local", True))
        message = protocol.SetTags(module_id=module, tags=list(tags), auth=auth)
        self._side.call(message, replies.TagsData).result()

    def start(self, request_id: str, prompt: Sequence[int], module: str, argument: str = "") -> list[int]:
        """Create an instance for a request. Returns the prompt to use, which the controller may have rewritten."""
        request = Request(request_id, tuple(prompt), controller=WasmController(module, argument))
        message, data_type = instantiation(request, self._process.config.dialect)
        return list(prompt_of(request, self._side.call(message, data_type).result()))

    # -- steps -------------------------------------------------------------------------------------------

    def begin(self, asks: Sequence[Ask]) -> None:
        """Report the changes of sequences, and start the callbacks. Every `begin` must be followed by `finish`."""
        try:
            self._exchange.begin(asks, self._freed, 0.0)
        except ProtocolError as error:
            raise ControllerError(f"the control runtime has ended: {error}") from None
        self._freed = []

    def finish(self, timeout: float = 60.0) -> dict[int, Answer]:
        """Wait for the answers to the last `begin`. Returns the answers by sequence number."""
        try:
            answers = self._exchange.receive(timeout)
        except ProtocolError as error:
            raise ControllerError(f"the control runtime has ended: {error}") from None
        if answers is None:
            raise ControllerTimeout(f"the control runtime gave no answer within {timeout:g} s")
        return answers

    def free(self, *seq_ids: int) -> None:
        """Record that these sequences have ended; the next `begin` reports it to the runtime."""
        self._freed.extend(seq_ids)

    def allowed(self, mask: bytes) -> npt.NDArray[np.bool_]:
        """Return a branch's mask as an array of `vocab_size` booleans."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self.vocab_size, bitorder="little")
        return bits.astype(np.bool_)

    # -- shutdown ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the runtime. Idempotent."""
        self._process.kill()
        self._side.close()
        self._process.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
