"""Builds an example curl command for the served models."""

from __future__ import annotations

import json
from typing import Any

from bridle.engine.interfaces import Task
from bridle.errors import UnknownModel
from bridle.serving import ModelRegistry


def curl_line(registry: ModelRegistry, base_url: str, needs_key: bool = False) -> str:
    """Return a curl command. If `needs_key`, the command has a placeholder for a key, and does not name the default
    model."""
    names = registry.names or registry.loadable_names
    name = names[0] if names else "demo"
    body: dict[str, Any] = {} if needs_key else {"model": name}
    path, example = _example(registry, name)
    quoted = json.dumps(body | example).replace("'", "'\\''")
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"curl -N {base_url}{path}{key} -H 'Content-Type: application/json' -d '{quoted}'"


def _example(registry: ModelRegistry, name: str) -> tuple[str, dict[str, Any]]:
    """Return a route for the model, and an example body."""
    task = _task(registry, name)
    if task != "generate":
        return ("v1/embeddings" if task == "embed" else "v1/classify"), {"input": ["Hello!"]}
    if _chats(registry, name):
        return "v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    return "v1/completions", {"prompt": "Once", "max_tokens": 50, "stream": True}


def _task(registry: ModelRegistry, name: str) -> Task:
    """Return the task of a model. A model that is not loaded is assumed to generate."""
    try:
        model = registry.slot_of(registry.choose(name).model).model
    except UnknownModel:
        return "generate"
    return "generate" if model is None else model.info.task


def _chats(registry: ModelRegistry, name: str) -> bool:
    """Return whether a model, or an adapter's base model, accepts chats; True for a model that is not loaded."""
    try:
        model = registry.slot_of(registry.choose(name).model).model
    except UnknownModel:
        return True
    return model is None or model.tokenizer.chat_template.is_present
