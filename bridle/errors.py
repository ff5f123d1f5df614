"""The classes of all errors that bridle raises on purpose.

An error message names the invalid value and the limit. `param` names the field of the request, so that every front end
can report the field in its own error format.
"""

from __future__ import annotations


class BridleError(Exception):
    """Base class of all errors that bridle raises on purpose."""

    #: Short, stable name of the kind of error; front ends map it to their own error types.
    code = "error"

    def __init_subclass__(cls, code: str = "") -> None:
        if code:
            cls.code = code


class InvalidRequest(BridleError, ValueError, code="invalid_request"):
    """The request cannot be served in this form. `param` names the invalid field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownKeyword(InvalidRequest, TypeError, code="unknown_keyword"):
    """A Python call has an unknown keyword; the message names the most similar known keyword."""


class ContextOverflow(InvalidRequest, code="context_length_exceeded"):
    """Prompt and output together exceed the context window or the whole KV cache."""


class UnsupportedFeature(InvalidRequest, code="unsupported_feature"):
    """The feature exists, but this model or this build does not support it."""


class TemplateFailure(InvalidRequest, code="template_error"):
    """A conversation cannot be rendered as a prompt: the model has no chat template, or the template refuses or fails
    on the messages."""


class UnknownModel(InvalidRequest, code="model_not_found"):
    """The server has no model with this name; the message lists the served models."""


class UnknownAdapter(InvalidRequest, code="adapter_not_found"):
    """The model has no adapter with this name; the message lists its adapters."""


class UnknownControlVector(InvalidRequest, code="control_vector_not_found"):
    """The model has no control vector with this name; the message lists its control vectors."""


class AdapterRefused(InvalidRequest, code="adapter_refused"):
    """An adapter cannot be applied: its files are damaged, malicious, made for another model, or of a kind that would
    give wrong results. The message names the invalid part and the reason."""


class MediaRefused(InvalidRequest, code="media_refused"):
    """An image, a sound or a video cannot be used: it is damaged, malicious, of an unsupported kind, or exceeds a
    limit. The message names the rule, and never contains the message of another library."""

    def __init__(self, message: str, param: str | None = "image") -> None:
        super().__init__(message, param)


class UnknownTrace(InvalidRequest, code="trace_not_found"):
    """No trace of this request is stored for this user."""


class UnknownResponse(InvalidRequest, code="response_not_found"):
    """No response with this id is stored for this user."""


class UnknownConversation(InvalidRequest, code="conversation_not_found"):
    """No conversation with this id, or no item with this id in it, is stored for this user."""


class UnknownFile(InvalidRequest, code="file_not_found"):
    """No file with this id is stored for this user."""


class UnknownBatch(InvalidRequest, code="batch_not_found"):
    """No batch with this id is stored for this user."""


class UnknownCache(InvalidRequest, code="cache_not_found"):
    """No prompt cache with this id is stored for this user."""


class UnknownStream(InvalidRequest, code="unknown_stream"):
    """No stream can be resumed with this key from this position: the stream was dropped, or it never existed."""


class UnsupportedModel(BridleError, code="unsupported_model"):
    """The model cannot be loaded, or would give wrong results; the message says why."""


class ModelUnavailable(BridleError, code="model_unavailable"):
    """A known model cannot be served now. The model is still loading, it could not be loaded, or the loaded models
    leave no room for it. `retry_after` is the number of seconds after which a retry may help."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unauthorized(BridleError, code="unauthorized"):
    """The request has no valid API key, or the owner of its key may not make it."""


class OutOfBlocks(BridleError, code="out_of_blocks"):
    """The KV cache cannot hold this sequence."""


class Overloaded(BridleError, code="overloaded"):
    """The server accepts no further requests now. `retry_after` is the number of seconds after which a retry may
    help."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ControllerError(BridleError, code="controller_error"):
    """A controller failed or violated a rule. Only the request of this controller ends. `logs` is the end of the
    controller's log, if known."""

    logs: str = ""


class ControllerTimeout(ControllerError, code="controller_timeout"):
    """A controller missed too many deadlines."""


class ControllerDeadlock(ControllerError, code="controller_deadlock"):
    """All outputs of a request wait, and no event can end any of these waits."""


class ControllerTrap(ControllerError, code="controller_trap"):
    """A controller crashed inside its sandbox."""


class ToolFailed(ControllerError, code="tool_failed"):
    """A tool gave no usable result: it failed, was late, returned too much, or does not exist. The error is raised
    where a controller reads the tool's result. The output ends, unless the controller catches this error."""


class ControllerUnavailable(ControllerError, code="controller_unavailable"):
    """The runtime that hosts controllers is not running, or has failed. A retry may help."""


class ShardUnavailable(BridleError, code="shard_unavailable"):
    """The process that runs the model has ended or does not answer. `retry_after` is the number of seconds after which
    a retry may help."""

    retry_after = 1.0


class DeviceLost(ShardUnavailable):
    """The GPU has failed permanently for this process; every further step would fail in the same way."""


class ConnectionLost(BridleError, code="connection_lost"):
    """The server cannot be reached, or the connection broke and could not be restored."""


class RemoteError(BridleError):
    """A server answered with an error of an unknown kind; `code` is the server's name for this kind. `is_retryable`
    says whether a retry may help, according to the server."""

    def __init__(self, message: str, code: str = "error", *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.is_retryable = is_retryable


class ProtocolError(BridleError, code="protocol_error"):
    """A peer sent a message that the wire format does not allow."""


class RequestCancelled(BridleError, code="cancelled"):
    """The request was cancelled by its client."""


class IncompleteOutput(BridleError, code="incomplete_output"):
    """An output ended before its object was complete; a larger `max_tokens` may help. `text` is the incomplete text."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class DeadlineExceeded(BridleError, code="deadline_exceeded"):
    """The request did not finish before its deadline."""


class EngineClosed(BridleError, code="engine_closed"):
    """The engine was shut down while, or before, the request ran."""


class EngineFailed(EngineClosed, code="engine_failed"):
    """The engine failed while, or before, the request ran. A server restarts the engine: `retry_after` is the number of
    seconds after which a retry may help."""

    retry_after = 1.0


class InternalError(BridleError, code="internal_error"):
    """A bug in bridle. Please report the message together with the log around it."""
