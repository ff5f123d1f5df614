"""Every error that bridle raises on purpose.

A message names the offending value and the limit. `param` names the field of the request, so that every
front-end can point at it in its own error format.
"""

from __future__ import annotations


class BridleError(Exception):
    """Base of all errors that bridle raises on purpose."""

    #: Short, stable name of the kind of error; front-ends map it onto their own error types.
    code = "error"


class InvalidRequest(BridleError, ValueError):
    """The request cannot be served in this form. `param` names the field at fault, when one is."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownKeyword(InvalidRequest, TypeError):
    """A call in Python was given a keyword that it does not have; the message has the nearest one."""

    code = "unknown_keyword"


class ContextOverflow(InvalidRequest):
    """Prompt and output together exceed the context window or the whole KV cache."""

    code = "context_length_exceeded"


class UnsupportedFeature(InvalidRequest):
    """The feature exists, but this model or this build does not have it."""

    code = "unsupported_feature"


class TemplateFailure(InvalidRequest):
    """A conversation cannot be rendered as a prompt: the model has no chat template, or the template refuses these
    messages or fails on them."""

    code = "template_error"


class UnknownModel(InvalidRequest):
    """No model of that name is served here; the message lists those that are."""

    code = "model_not_found"


class UnknownAdapter(InvalidRequest):
    """The model has no adapter of that name; the message lists those it has."""

    code = "adapter_not_found"


class UnknownControlVector(InvalidRequest):
    """The model has no control vector of that name; the message lists those it has."""

    code = "control_vector_not_found"


class AdapterRefused(InvalidRequest):
    """An adapter cannot be applied as its files are: damaged, hostile, of another model, or of a kind that would give
    wrong results. The message says which part, and why."""

    code = "adapter_refused"


class MediaRefused(InvalidRequest):
    """An image, a sound or a video cannot be used: it is damaged, hostile, of a kind that is not read, or beyond a
    limit. The message names the rule, and never repeats a library's message about it."""

    code = "media_refused"

    def __init__(self, message: str, param: str | None = "image") -> None:
        super().__init__(message, param)


class UnknownTrace(InvalidRequest):
    """No trace of that request is kept for this user."""

    code = "trace_not_found"


class UnknownResponse(InvalidRequest):
    """No response of that id is kept for this user."""

    code = "response_not_found"


class UnknownConversation(InvalidRequest):
    """No conversation of that id, or no item of that id in it, is kept for this user."""

    code = "conversation_not_found"


class UnknownFile(InvalidRequest):
    """No file of that id is kept for this user."""

    code = "file_not_found"


class UnknownBatch(InvalidRequest):
    """No batch of that id is kept for this user."""

    code = "batch_not_found"


class UnknownCache(InvalidRequest):
    """No prompt cache of that id is kept for this user."""

    code = "cache_not_found"


class UnknownStream(InvalidRequest):
    """No stream can be resumed under that key, or not from that position: it is forgotten, or never existed."""

    code = "unknown_stream"


class UnsupportedModel(BridleError):
    """The model cannot be loaded, or would give wrong results; the message says why."""

    code = "unsupported_model"


class ModelUnavailable(BridleError):
    """A known model cannot be served now: it is still loading, could not be loaded, or there is no room for it next
    to the models in use. `retry_after` is a hint in seconds."""

    code = "model_unavailable"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unauthorized(BridleError):
    """The request carries no valid key, or its owner may not do this."""

    code = "unauthorized"


class OutOfBlocks(BridleError):
    """The KV cache cannot hold this sequence."""

    code = "out_of_blocks"


class Overloaded(BridleError):
    """The service takes no further request now. `retry_after` is a hint in seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ControllerError(BridleError):
    """A controller failed or asked for something forbidden; ends its own request only. `logs` is the end of its log,
    where that is known."""

    code = "controller_error"
    logs: str = ""


class ControllerTimeout(ControllerError):
    """A controller did not answer in time, too often."""

    code = "controller_timeout"


class ControllerDeadlock(ControllerError):
    """All outputs of a request wait, and nothing can end that."""

    code = "controller_deadlock"


class ControllerTrap(ControllerError):
    """A controller crashed inside its sandbox."""

    code = "controller_trap"


class ToolFailed(ControllerError):
    """A tool gave no answer, or none that can be used: it failed, was late, said too much, or does not exist. Raised
    where a controller reads the answer, and ends its output unless the controller takes it."""

    code = "tool_failed"


class ControllerUnavailable(ControllerError):
    """The runtime that hosts controllers is not up, or failed by itself. Trying again may help."""

    code = "controller_unavailable"


class ShardUnavailable(BridleError):
    """The process that runs the model has ended or does not answer. `retry_after` is a hint in seconds."""

    code = "shard_unavailable"
    retry_after = 1.0


class DeviceLost(ShardUnavailable):
    """The GPU has failed permanently for this process; every further step would fail in the same way."""


class ConnectionLost(BridleError):
    """The server cannot be reached, or the connection broke and could not be made again."""

    code = "connection_lost"


class RemoteError(BridleError):
    """A server answered with an error of a kind that is not known here; `code` is its name there. `is_retryable` says
    whether another try may help, according to the server."""

    code = "error"

    def __init__(self, message: str, code: str = "error", *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.is_retryable = is_retryable


class ProtocolError(BridleError):
    """A peer sent something that its wire format does not allow."""

    code = "protocol_error"


class RequestCancelled(BridleError):
    """The request was cancelled by its owner."""

    code = "cancelled"


class IncompleteOutput(BridleError):
    """An output that was to be an object ended before it was one: more `max_tokens` may help. `text` is the incomplete
    text."""

    code = "incomplete_output"

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class DeadlineExceeded(BridleError):
    """The request did not finish before its deadline."""

    code = "deadline_exceeded"


class EngineClosed(BridleError):
    """The engine was shut down while, or before, the request ran."""

    code = "engine_closed"


class EngineFailed(EngineClosed):
    """The engine failed while, or before, the request ran. A server starts it again: `retry_after` is a hint in
    seconds."""

    code = "engine_failed"
    retry_after = 1.0


class InternalError(BridleError):
    """A bug in bridle. Please report it with the message and the log around it."""

    code = "internal_error"
