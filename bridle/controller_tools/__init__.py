"""Tools that controllers may call while their outputs wait, and the code that runs the calls, outside of the engine's
steps."""

from __future__ import annotations

from bridle.controller_tools.call import Call
from bridle.controller_tools.client import CALL_VARIABLE, OF_REQUESTS, ClientTool, check_client_tools
from bridle.controller_tools.executor import Tool, ToolExecutor
from bridle.controller_tools.functions import FunctionTool, function_tools
from bridle.controller_tools.limits import DEFAULT_LIMITS, ToolLimits
from bridle.controller_tools.session import Desk, ToolCallContext, ToolSession

__all__ = [
    "CALL_VARIABLE",
    "DEFAULT_LIMITS",
    "OF_REQUESTS",
    "ToolCallContext",
    "Call",
    "ToolSession",
    "ClientTool",
    "Desk",
    "FunctionTool",
    "Tool",
    "ToolExecutor",
    "ToolLimits",
    "check_client_tools",
    "function_tools",
]
