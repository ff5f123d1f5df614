"""Checks with the real oterm; the argument is a server's address. oterm's own functions send the requests of a new chat
and of a message, without oterm's screen."""

from __future__ import annotations

import asyncio
import os
import sys

os.environ["OLLAMA_URL"] = sys.argv[1]

from oterm.agent import get_agent
from oterm.providers import ollama
from oterm.providers.capabilities import get_capabilities

assert [model.model for model in ollama.list_models().models] == ["demo"]
shown = ollama.show_model("demo")
assert ollama.parse_modelfile_parameters(shown.parameters or "")["temperature"] == 0.8
assert ollama.running_context_length("demo") == 2048
assert get_capabilities("ollama", "demo").supports_tools
agent = get_agent(model="demo", parameters={"temperature": 0})
assert "Paris" in asyncio.run(agent.run("What is the capital of France?")).output
print("oterm ok")
