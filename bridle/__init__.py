"""Bridle: language models that can be steered, token by token.

    from bridle import LLM, SamplingParams

    llm = LLM("demo")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].text)

Everything listed in `__all__` is a promise; the modules below may move. Names are loaded when first used:
`import bridle` alone costs nothing and `from bridle import SamplingParams` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.aici.client.reference import WasmController
    from bridle.config import EngineConfig, ModelConfig
    from bridle.constraints.spec import (
        After,
        Choice,
        Concat,
        Constraint,
        Gbnf,
        JsonObject,
        JsonSchema,
        Lark,
        OneOf,
        Regex,
        Substring,
        Yacc,
    )
    from bridle.controllers.python import Controller, SequenceView
    from bridle.engine.decision import Branch, Decision, Splice
    from bridle.errors import (
        BridleError,
        ContextOverflow,
        ControllerDeadlock,
        ControllerError,
        ControllerTimeout,
        ControllerTrap,
        ControllerUnavailable,
        DeadlineExceeded,
        EngineClosed,
        InternalError,
        InvalidRequest,
        OutOfBlocks,
        Overloaded,
        ProtocolError,
        RequestCancelled,
        ShardUnavailable,
        UnsupportedFeature,
        UnsupportedModel,
    )
    from bridle.llm import LLM, ChatSession
    from bridle.outputs import ChatMessage, CompletionOutput, FinishReason, Logprob, RequestOutput, ToolCall, Usage
    from bridle.sampling import SamplingParams, Watermark

__version__ = "0.1.0"

_HOMES = {
    "bridle.aici.client.reference": ("WasmController",),
    "bridle.config": ("EngineConfig", "ModelConfig"),
    "bridle.constraints.spec": (
        "After",
        "Choice",
        "Concat",
        "Constraint",
        "Gbnf",
        "JsonObject",
        "JsonSchema",
        "Lark",
        "OneOf",
        "Regex",
        "Substring",
        "Yacc",
    ),
    "bridle.controllers.python": ("Controller", "SequenceView"),
    "bridle.engine.decision": ("Branch", "Decision", "Splice"),
    "bridle.errors": (
        "BridleError",
        "ContextOverflow",
        "ControllerDeadlock",
        "ControllerError",
        "ControllerTimeout",
        "ControllerTrap",
        "ControllerUnavailable",
        "DeadlineExceeded",
        "EngineClosed",
        "InternalError",
        "InvalidRequest",
        "OutOfBlocks",
        "Overloaded",
        "ProtocolError",
        "RequestCancelled",
        "ShardUnavailable",
        "UnsupportedFeature",
        "UnsupportedModel",
    ),
    "bridle.llm": ("LLM", "ChatSession"),
    "bridle.outputs": (
        "ChatMessage",
        "CompletionOutput",
        "FinishReason",
        "Logprob",
        "RequestOutput",
        "ToolCall",
        "Usage",
    ),
    "bridle.sampling": ("SamplingParams", "Watermark"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "After",
    "Branch",
    "BridleError",
    "ChatMessage",
    "ChatSession",
    "Choice",
    "CompletionOutput",
    "Concat",
    "Constraint",
    "ContextOverflow",
    "Controller",
    "ControllerDeadlock",
    "ControllerError",
    "ControllerTimeout",
    "ControllerTrap",
    "ControllerUnavailable",
    "DeadlineExceeded",
    "Decision",
    "EngineClosed",
    "EngineConfig",
    "FinishReason",
    "Gbnf",
    "InternalError",
    "InvalidRequest",
    "JsonObject",
    "JsonSchema",
    "LLM",
    "Lark",
    "Logprob",
    "ModelConfig",
    "OneOf",
    "OutOfBlocks",
    "Overloaded",
    "ProtocolError",
    "Regex",
    "RequestCancelled",
    "RequestOutput",
    "SamplingParams",
    "SequenceView",
    "ShardUnavailable",
    "Splice",
    "Substring",
    "ToolCall",
    "UnsupportedFeature",
    "UnsupportedModel",
    "Usage",
    "WasmController",
    "Watermark",
    "Yacc",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'bridle' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
