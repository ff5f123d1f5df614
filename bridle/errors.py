"""Every error that bridle raises on purpose.

A message names the offending value and the limit. `param` names the field of the request, so that every
front-end can point at it in its own error format.
"""

from __future__ import annotations


class BridleError(Exception):
    """Base of all errors that bridle raises on purpose."""

    #: Short, stable name of the kind of error; front-ends map it onto their own error types.
    code = "error"

    def __init_subclass__(cls, code: str = "") -> None:
        if code:
            cls.code = code


class InvalidRequest(BridleError, ValueError, code="invalid_request"):
    """The request cannot be served in this form. `param` names the field at fault, when one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownKeyword(InvalidRequest, TypeError, code="unknown_keyword"):
    """A call in Python was given a keyword that it does not have; the message has the nearest one."""


class ContextOverflow(InvalidRequest, code="context_length_exceeded"):
    """Prompt and output together exceed the context window or the whole KV cache."""


class UnsupportedFeature(InvalidRequest, code="unsupported_feature"):
    """The feature exists, but this model or this build does not have it."""


class TemplateFailure(InvalidRequest, code="template_error"):
    """A conversation cannot be rendered as a prompt: the model has no chat template, or the template refuses these
    messages or fails on them."""


class UnknownModel(InvalidRequest, code="model_not_found"):
    """No model of that name is served here; the message lists those that are."""


class UnknownAdapter(InvalidRequest, code="adapter_not_found"):
    """The model has no adapter of that name; the message lists those it has."""


class UnknownControlVector(InvalidRequest, code="control_vector_not_found"):
    """The model has no control vector of that name; the message lists those it has."""


class AdapterRefused(InvalidRequest, code="adapter_refused"):
    """An adapter cannot be applied as its files are: damaged, hostile, of another model, or of a kind that would give
    wrong results. The message says which part, and why."""


class MediaRefused(InvalidRequest, code="media_refused"):
    """An image, a sound or a video cannot be used: it is damaged, hostile, of a kind that is not read, or beyond a
    limit. The message names the rule, and never repeats a library's message about it."""

    def __init__(self, message: str, param: str | None = "image") -> None:
        super().__init__(message, param)


class UnknownTrace(InvalidRequest, code="trace_not_found"):
    """No trace of that request is kept for this user."""


class UnknownResponse(InvalidRequest, code="response_not_found"):
    """No response of that id is kept for this user."""


class UnknownConversation(InvalidRequest, code="conversation_not_found"):
    """No conversation of that id, or no item of that id in it, is kept for this user."""


class UnknownFile(InvalidRequest, code="file_not_found"):
    """No file of that id is kept for this user."""


class UnknownBatch(InvalidRequest, code="batch_not_found"):
    """No batch of that id is kept for this user."""


class UnknownCache(InvalidRequest, code="cache_not_found"):
    """No prompt cache of that id is kept for this user."""


class UnknownStream(InvalidRequest, code="unknown_stream"):
    """No stream can be resumed under that key, or not from that position: it is forgotten, or never existed."""


class UnsupportedModel(BridleError, code="unsupported_model"):
    """The model cannot be loaded, or would give wrong results; the message says why."""


class ModelUnavailable(BridleError, code="model_unavailable"):
    """A known model cannot be served now: it is still loading, could not be loaded, or there is no room for it next
    to the models in use. `retry_after` is a hint in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unauthorized(BridleError, code="unauthorized"):
    """The request carries no valid key, or its owner may not do this."""


class OutOfBlocks(BridleError, code="out_of_blocks"):
    """The KV cache cannot hold this sequence."""


class Overloaded(BridleError, code="overloaded"):
    """The service takes no further request now. `retry_after` is a hint in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ControllerError(BridleError, code="controller_error"):
    """A controller failed or asked for something forbidden; ends its own request only. `logs` is the end of its log,
    where that is known."""

    logs: str = ""


class ControllerTimeout(ControllerError, code="controller_timeout"):
    """A controller did not answer in time, too often."""


class ControllerDeadlock(ControllerError, code="controller_deadlock"):
    """All outputs of a request wait, and nothing can end that."""


class ControllerTrap(ControllerError, code="controller_trap"):
    """A controller crashed inside its sandbox."""


class ToolFailed(ControllerError, code="tool_failed"):
    """A tool gave no answer, or none that can be used: it failed, was late, said too much, or does not exist. Raised
    where a controller reads the answer, and ends its output unless the controller takes it."""


class ControllerUnavailable(ControllerError, code="controller_unavailable"):
    """The runtime that hosts controllers is not up, or failed by itself. Trying again may help."""


class ShardUnavailable(BridleError, code="shard_unavailable"):
    """The process that runs the model has ended or does not answer. `retry_after` is a hint in seconds."""

    retry_after = 1.0


class DeviceLost(ShardUnavailable):
    """The GPU has failed permanently for this process; every further step would fail in the same way."""


class ConnectionLost(BridleError, code="connection_lost"):
    """The server cannot be reached, or the connection broke and could not be made again."""


class RemoteError(BridleError):
    """A server answered with an error of a kind that is not known here; `code` is its name there. `is_retryable` says
    whether another try may help, according to the server."""

    def __init__(self, message: str, code: str = "error", *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.is_retryable = is_retryable


class ProtocolError(BridleError, code="protocol_error"):
    """A peer sent something that its wire format does not allow."""


class RequestCancelled(BridleError, code="cancelled"):
    """The request was cancelled by its owner."""


class IncompleteOutput(BridleError, code="incomplete_output"):
    """An output that was to be an object ended before it was one: more `max_tokens` may help. `text` is the incomplete
    text."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class DeadlineExceeded(BridleError, code="deadline_exceeded"):
    """The request did not finish before its deadline."""


class EngineClosed(BridleError, code="engine_closed"):
    """The engine was shut down while, or before, the request ran."""


class EngineFailed(EngineClosed, code="engine_failed"):
    """The engine failed while, or before, the request ran. A server starts it again: `retry_after` is a hint in
    seconds."""

    retry_after = 1.0


class InternalError(BridleError, code="internal_error"):
    """A bug in bridle. Please report it with the message and the log around it."""
