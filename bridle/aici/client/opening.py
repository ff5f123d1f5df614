"""Making an instance for a request: the message of either dialect, and what the reply means."""

from __future__ import annotations

from typing import Any

import msgspec

from bridle.aici import protocol
from bridle.aici.client.reference import WasmController
from bridle.engine.request import Request
from bridle.errors import ControllerError, InvalidRequest


def instantiation(request: Request, dialect: int) -> tuple[protocol.Instantiate, Any]:
    """The message, and the type of its reply. Raises `InvalidRequest` for what the dialect cannot do."""
    controller = request.controller
    if not isinstance(controller, WasmController):
        raise ControllerError(f"a {type(controller).__name__} is no Wasm controller")
    if dialect == 1 and request.sampling.n > 1:
        raise InvalidRequest("n is above 1; a runtime of dialect 1 cannot copy a controller for each output", "n")
    message = protocol.Instantiate(
        req_id=request.id,
        prompt=list(request.prompt),
        module_id=controller.module,
        module_arg=msgspec.Raw(msgspec.json.encode(controller.argument)),
        auth=msgspec.to_builtins(controller.auth),
    )
    return message, dict[str, Any] if dialect == 1 else protocol.SeqResult[protocol.PromptResult]


def prompt_of(request: Request, data: Any) -> tuple[int, ...]:
    """The prompt to use. Raises `ControllerError` if the controller did not start."""
    if isinstance(data, dict):  # dialect 1 does not rewrite prompts; its later form told of a failure here
        if data.get("error"):
            raise ControllerError(_with_logs(str(data["error"]), str(data.get("logs", ""))))
        return request.prompt
    if data.result is None:
        raise ControllerError(_with_logs(data.error or "the controller did not start", data.logs))
    return tuple(data.result.prompt)


def _with_logs(error: str, logs: str) -> str:
    return f"{error}\n{logs}" if logs and logs not in error else error
