"""What the generator produces: exercises, and the documents they are put into.

An `Exercise` is one thing to learn, in the form of chat messages, of plain text, or both. A `Document` is one
training text, cut into pieces that count in the loss and pieces that do not. The chat layout written here is
the one of `chat_template.jinja`; a test holds the two together. Nothing here knows tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

BOS, EOS = "<|bos|>", "<|eos|>"
SYSTEM, USER, ASSISTANT, TOOL, END = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"
THINK_HINT = "Think before you answer."
TOOLS_HEADER = "Tools:"

Message = dict[str, Any]
"""An OpenAI chat message: role, content, and for some `tool_calls` or `reasoning_content`."""

ToolSpec = dict[str, Any]
"""An OpenAI tool: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class Piece(NamedTuple):
    """A stretch of a document's text, and whether the model is trained to produce it."""

    text: str
    is_target: bool


@dataclass(frozen=True, slots=True)
class Exercise:
    """One thing to learn, with the key that decides whether it may be trained on.

    `messages` is the chat form (empty if there is none); the last one is the expected answer. `prompt` and
    `completion` are the plain form (both empty if there is none).
    """

    category: str
    key: tuple[str, ...]
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""
    tools: tuple[ToolSpec, ...] = ()
    thinking: bool = False
    is_alone: bool = field(default=False)
    """Whether the conversation may hold nothing else, because a system message of its own rules it."""


def ask(category: str, key: tuple[str, ...], question: str, answer: str) -> Exercise:
    """An exercise of one question and its answer, usable in a chat and as plain `Q:`/`A:` text."""
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Exercise(category, key, messages, f"Q: {question}\nA:", f" {answer}")


def complete(category: str, key: tuple[str, ...], prompt: str, completion: str) -> Exercise:
    """An exercise of plain text only: a beginning and how it goes on."""
    return Exercise(category, key, (), prompt, completion)


def chat_pieces(
    messages: tuple[Message, ...] | list[Message], tools: tuple[ToolSpec, ...] = (), thinking: bool = False
) -> list[Piece]:
    """The pieces of a conversation, laid out as the chat template does.

    What the assistant says, its closing `<|end|>` included, is a target; all else is given.
    """
    pieces = [Piece(BOS, False)]
    system, rest = _system_text(messages, tools, thinking)
    if system:
        pieces.append(Piece(f"{SYSTEM}{system}{END}", False))
    last_user = max((i for i, message in enumerate(rest) if message["role"] == "user"), default=-1)
    for index, message in enumerate(rest):
        if message["role"] == "assistant":
            pieces.append(Piece(ASSISTANT, False))
            pieces.append(Piece(_assistant_text(message, index > last_user) + END, True))
        else:
            role = TOOL if message["role"] == "tool" else USER
            pieces.append(Piece(f"{role}{message['content']}{END}", False))
    return pieces


def tool_line(tool: ToolSpec) -> str:
    """A tool's signature as the model sees it: `- name(argument: type, ...): description`."""
    function = tool["function"]
    properties = function["parameters"]["properties"]
    arguments = ", ".join(f"{name}: {schema['type']}" for name, schema in properties.items())
    return f"- {function['name']}({arguments}): {function['description']}"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _system_text(
    messages: tuple[Message, ...] | list[Message], tools: tuple[ToolSpec, ...], thinking: bool
) -> tuple[str, list[Message]]:
    rest = list(messages)
    parts: list[str] = []
    if rest and rest[0]["role"] == "system":
        parts.append(rest.pop(0)["content"])
    if thinking:
        parts.append(THINK_HINT)
    if tools:
        parts.append("\n".join([TOOLS_HEADER, *map(tool_line, tools)]))
    return "\n".join(parts), rest


def _assistant_text(message: Message, keep_thoughts: bool) -> str:
    text = message.get("content") or ""
    thoughts = message.get("reasoning_content")
    if thoughts and keep_thoughts:
        text = f"<think>\n{thoughts}\n</think>\n\n{text}"
    calls = "\n".join(
        call_text(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
    )
    return "\n".join(part for part in (text, calls) if part)
