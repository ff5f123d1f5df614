"""Messages that create a controller's instance for a request, in each dialect, and the decoding of their replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bridle.aici import protocol, replies
from bridle.aici.client.dialect2 import stored_values
from bridle.aici.client.reference import WasmController
from bridle.engine.interfaces import Answer, Ask
from bridle.engine.request import Request
from bridle.errors import ControllerError, InvalidRequest


def instantiation(request: Request, dialect: int) -> tuple[protocol.Instantiate, Any]:
    """Return the instantiation message and the type of its reply. Raises `InvalidRequest` if the dialect cannot express
    the request."""
    controller = request.controller
    if not isinstance(controller, WasmController):
        raise ControllerError(
            f"controller is a {type(controller).__name__}; the control runtime runs only Wasm controllers"
        )
    if dialect == 1 and request.sampling.n > 1:
        raise InvalidRequest("n is above 1; a runtime of dialect 1 cannot copy a controller for each output", "n")
    message = protocol.Instantiate(
        req_id=request.id,
        prompt=list(request.prompt),
        module_id=controller.module,
        module_arg=msgspec.Raw(msgspec.json.encode(controller.argument)),
        auth=msgspec.to_builtins(controller.auth),
        traceparent=request.metadata.get("traceparent"),
    )
    return message, dict[str, Any] if dialect == 1 else replies.SeqResult[replies.PromptResult]


def prompt_of(request: Request, data: Any) -> tuple[int, ...]:
    """Return the prompt to use, which the controller may have rewritten. Raises `ControllerError` if the controller did
    not start."""
    if isinstance(data, dict):  # dialect 1 does not rewrite prompts; its later form reports a failure here
        if data.get("error"):
            raise ControllerError(_with_logs(str(data["error"]), str(data.get("logs", ""))))
        return request.prompt
    if data.result is None:
        raise ControllerError(_with_logs(data.error or "the controller did not start", data.logs))
    return tuple(data.result.prompt)


def module_of(data: Any) -> str | None:
    """Return the hash of the new instance's module; None if the runtime does not report the hash."""
    return data.module_id if isinstance(data, replies.SeqResult) and isinstance(data.module_id, str) else None


class InitialOutput:
    """Output that controllers printed and stored while their instances were created. The output is kept until the first
    answer of a sequence carries it to the client."""

    def __init__(self) -> None:
        self._by_request: dict[str, Answer] = {}
        self._by_sequence: dict[int, Answer] = {}

    def note_instance(self, request: Request, data: Any) -> None:
        """Keep what the controller printed and stored when the request's instance was made. Safe from any thread."""
        if not isinstance(data, dict) and (data.logs or data.storage):
            self._by_request[request.id] = Answer(log=data.logs, stored=stored_values(data.storage))

    def claim(self, ask: Ask) -> None:
        """Assign a request's kept output to the first sequence of the request."""
        if ask.request is not None and (said := self._by_request.pop(ask.request.id, None)) is not None:
            self._by_sequence[ask.seq_id] = said

    def add_to(self, answers: Mapping[int, Answer]) -> None:
        """Put the kept output before the first answer of each sequence."""
        for seq_id in self._by_sequence.keys() & answers.keys():
            said, answer = self._by_sequence.pop(seq_id), answers[seq_id]
            answer.log, answer.stored = said.log + answer.log, said.stored + answer.stored

    def forget(self, request: Request) -> None:
        """Drop the kept output of a request that will never run."""
        self._by_request.pop(request.id, None)


def _with_logs(error: str, logs: str) -> str:
    return f"{error}\n{logs}" if logs and logs not in error else error
