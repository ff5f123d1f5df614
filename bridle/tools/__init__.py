"""Tools: what controllers may call while their outputs wait, and what runs the calls, outside of the engine's steps."""

from __future__ import annotations

from bridle.tools.call import Call
from bridle.tools.caller import Behalf, Caller, Desk
from bridle.tools.client import CALL_VARIABLE, OF_REQUESTS, ClientTool, check_client_tools
from bridle.tools.desk import Tool, ToolDesk
from bridle.tools.functions import FunctionTool, function_tools
from bridle.tools.limits import DEFAULT_LIMITS, ToolLimits

__all__ = [
    "CALL_VARIABLE",
    "DEFAULT_LIMITS",
    "OF_REQUESTS",
    "Behalf",
    "Call",
    "Caller",
    "ClientTool",
    "Desk",
    "FunctionTool",
    "Tool",
    "ToolDesk",
    "ToolLimits",
    "check_client_tools",
    "function_tools",
]
