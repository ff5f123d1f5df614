"""Bridle: language models that can be steered, token by token.

    from bridle import LLM, SamplingParams

    llm = LLM("demo")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].text)

All names in `__all__` are stable; the modules that define them may move. Names are loaded when they are first used:
`import bridle` alone imports little, and `from bridle import SamplingParams` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.aici.client.reference import WasmController as WasmController
    from bridle.config import EngineConfig as EngineConfig
    from bridle.config import ModelConfig as ModelConfig
    from bridle.controller_tools.call import Call as Call
    from bridle.controller_tools.limits import ToolLimits as ToolLimits
    from bridle.controllers.python import Controller as Controller
    from bridle.controllers.python import SequenceView as SequenceView
    from bridle.engine.control.decision import Branch as Branch
    from bridle.engine.control.decision import Decision as Decision
    from bridle.engine.control.decision import Splice as Splice
    from bridle.errors import BridleError as BridleError
    from bridle.errors import ContextOverflow as ContextOverflow
    from bridle.errors import ControllerDeadlock as ControllerDeadlock
    from bridle.errors import ControllerError as ControllerError
    from bridle.errors import ControllerTimeout as ControllerTimeout
    from bridle.errors import ControllerTrap as ControllerTrap
    from bridle.errors import ControllerUnavailable as ControllerUnavailable
    from bridle.errors import DeadlineExceeded as DeadlineExceeded
    from bridle.errors import EngineClosed as EngineClosed
    from bridle.errors import InternalError as InternalError
    from bridle.errors import InvalidRequest as InvalidRequest
    from bridle.errors import OutOfBlocks as OutOfBlocks
    from bridle.errors import Overloaded as Overloaded
    from bridle.errors import ProtocolError as ProtocolError
    from bridle.errors import RequestCancelled as RequestCancelled
    from bridle.errors import ShardUnavailable as ShardUnavailable
    from bridle.errors import ToolFailed as ToolFailed
    from bridle.errors import UnsupportedFeature as UnsupportedFeature
    from bridle.errors import UnsupportedModel as UnsupportedModel
    from bridle.llm import LLM as LLM
    from bridle.llm import ChatSession as ChatSession
    from bridle.outputs import ChatMessage as ChatMessage
    from bridle.outputs import CompletionOutput as CompletionOutput
    from bridle.outputs import FinishReason as FinishReason
    from bridle.outputs import Logprob as Logprob
    from bridle.outputs import RequestOutput as RequestOutput
    from bridle.outputs import ToolCall as ToolCall
    from bridle.outputs import Usage as Usage
    from bridle.sampling import SamplingParams as SamplingParams
    from bridle.sampling_values import Watermark as Watermark
    from bridle.structured_output.spec import After as After
    from bridle.structured_output.spec import Choice as Choice
    from bridle.structured_output.spec import Concat as Concat
    from bridle.structured_output.spec import Constraint as Constraint
    from bridle.structured_output.spec import Gbnf as Gbnf
    from bridle.structured_output.spec import JsonObject as JsonObject
    from bridle.structured_output.spec import JsonSchema as JsonSchema
    from bridle.structured_output.spec import Lark as Lark
    from bridle.structured_output.spec import OneOf as OneOf
    from bridle.structured_output.spec import Regex as Regex
    from bridle.structured_output.spec import Substring as Substring
    from bridle.structured_output.spec import Yacc as Yacc

__version__ = "0.2.0"

import_module("bridle.deprecated_names").install()

_HOMES = {
    "bridle.aici.client.reference": "WasmController",
    "bridle.config": "EngineConfig ModelConfig",
    "bridle.structured_output.spec": (
        "After Choice Concat Constraint Gbnf JsonObject JsonSchema Lark OneOf Regex Substring Yacc"
    ),
    "bridle.controllers.python": "Controller SequenceView",
    "bridle.engine.control.decision": "Branch Decision Splice",
    "bridle.errors": (
        "BridleError ContextOverflow ControllerDeadlock ControllerError ControllerTimeout ControllerTrap "
        "ControllerUnavailable DeadlineExceeded EngineClosed InternalError InvalidRequest OutOfBlocks Overloaded "
        "ProtocolError RequestCancelled ShardUnavailable ToolFailed UnsupportedFeature UnsupportedModel"
    ),
    "bridle.llm": "LLM ChatSession",
    "bridle.outputs": "ChatMessage CompletionOutput FinishReason Logprob RequestOutput ToolCall Usage",
    "bridle.sampling": "SamplingParams",
    "bridle.sampling_values": "Watermark",
    "bridle.controller_tools.call": "Call",
    "bridle.controller_tools.limits": "ToolLimits",
}
HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [*sorted(HOME_OF), "__version__"]  # type checkers read the imports above instead


def _load(name: str) -> Any:
    module = HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'bridle' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # to a type checker, a name that is not imported above is an error
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)
