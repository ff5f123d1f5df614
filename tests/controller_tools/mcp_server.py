"""A server of the Model Context Protocol over standard input and output, in plain Python, that can misbehave.

    python mcp_server.py FOLDER

The server records each start in FOLDER, so that tests can count the starts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

TOOLS = ("echo", "slow", "dies", "huge", "broken", "fails", "structured", "mixed", "get_current_time")


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}], **more}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "echo":
            return text(json.dumps(arguments))
        case "slow":
            time.sleep(3600)
        case "dies":
            os._exit(7)
        case "huge":
            return text("x" * (100 << 20))
        case "broken":
            sys.stdout.write('{"jsonrpc": "2.0", "id": \n')
            return text("after the broken line")
        case "fails":
            return text("no such city", isError=True)
        case "structured":
            return {"content": [], "structuredContent": {"degrees": 3.5}}
        case "mixed":
            picture = {"type": "image", "data": "", "mimeType": "image/png"}
            return {"content": [{"type": "text", "text": "one"}, picture, {"type": "text", "text": "two"}]}
        case "get_current_time":  # as the reference server for times answers
            return text(json.dumps({"timezone": arguments["timezone"], "datetime": "2026-11-23T12:34:56+00:00"}))
    return text("?")


def main() -> None:
    with tempfile.NamedTemporaryFile(dir=sys.argv[1], delete=False):
        pass
    if len(sys.argv) > 2:
        sys.exit(sys.argv[2])
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        params = message.get("params") or {}
        result: dict[str, Any] = {}
        if message["method"] == "initialize":
            result = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "test", "version": "1"},
            }
        elif message["method"] == "tools/list":
            first = TOOLS[:3] if not params.get("cursor") else TOOLS[3:]
            result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in first]}
            if not params.get("cursor"):
                result["nextCursor"] = "more"
        elif message["method"] == "tools/call":
            result = call(params["name"], params.get("arguments") or {})
        say({"jsonrpc": "2.0", "id": message["id"], "result": result})


main()
