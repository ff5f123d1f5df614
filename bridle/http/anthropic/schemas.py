"""Request bodies of the Messages API, and their conversion to conversations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from bridle.chat.stream_deltas import own_id
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.fields import InnerFields
from bridle.http.openai import schemas as openai
from bridle.multimodal.modalities import reads
from bridle.safe_repr import short_repr
from bridle.tokenizer.chat_settings import ToolPrompt

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ThinkingFields(InnerFields):
    """The field `thinking`: whether the model reasons, and the maximum number of reasoning tokens."""

    within: ClassVar[str] = "thinking"

    type: str
    budget_tokens: int | None = None


class OutputFields(InnerFields):
    """The field `output_config`: the format of the answer, and the reasoning effort."""

    within: ClassVar[str] = "output_config"

    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesBody(openai.SamplingFields):
    """Body of `POST /v1/messages`. In addition to Anthropic's fields, the body has bridle's fields for sampling,
    controllers and constraints, as on other routes."""

    messages: Annotated[openai.JsonObjects, openai.objects("messages", openai.MAX_MESSAGES)]
    system: Annotated[str | openai.JsonObjects | None, openai.text_or_objects("system", openai.MAX_MESSAGES)] = None
    stop_sequences: openai.Stop = ()
    tools: Annotated[openai.JsonObjects | None, openai.objects("tools", openai.MAX_TOOLS)] = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingFields | None = None
    thinking_budget_message: str | None = None
    output_config: OutputFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_prompt: ToolPrompt | None = None
    cache_control: dict[str, Any] | None = None

    def to_chat(self, model: str, modalities: Collection[str] = ()) -> tuple[openai.ChatBody, str]:
        """Return the body as a chat request to `model`, and the given beginning of the answer. `modalities` are the
        kinds of media that the model accepts. If the last message is the assistant's, the answer continues it. Raises
        `InvalidRequest` that names the invalid message or tool."""
        if self.max_tokens is None:
            raise InvalidRequest("max_tokens is required", "max_tokens")
        if self.n is not None and self.n != 1:
            raise InvalidRequest(f"n is {self.n}; must be 1, because this API returns one answer", "n")
        try:
            messages = self._messages()
        except UnsupportedFeature as error:
            raise UnsupportedFeature(f"{error}; {reads(model, modalities)}", error.param) from None
        prefill = ""
        if len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            prefill = messages.pop()["content"]
        given = {name: getattr(self, name) for name in openai.SamplingFields.model_fields}
        given["stop"] = (*self.stop, *self.stop_sequences)
        if self.output_config is not None and self.output_config.format is not None:
            given["response_format"] = _format(self.output_config.format)
        chat = openai.ChatBody.model_construct(
            **given,
            messages=messages,
            tools=None if self.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=not (self.tool_choice or {}).get("disable_parallel_tool_use", False),
            chat_template_kwargs=self._template_variables(),
            thinking_budget=self._budget(),
            thinking_budget_message=self.thinking_budget_message,
            tool_prompt=self.tool_prompt,
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
        )
        return chat, prefill

    def _messages(self) -> openai.JsonObjects:
        messages = [] if self.system is None else [{"role": "system", "content": _text(self.system, "system")}]
        for position, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{position}]")
        return messages

    def _budget(self) -> int | None:
        thinking = self.thinking
        if thinking is None or thinking.type in ("disabled", "adaptive", "between_tools"):
            return None
        if thinking.type != "enabled":
            raise InvalidRequest(
                f"thinking.type is {thinking.type[:80]!r}; must be enabled, adaptive or disabled", "thinking"
            )
        if thinking.budget_tokens is None or thinking.budget_tokens < 1:
            raise InvalidRequest(f"thinking.budget_tokens is {thinking.budget_tokens}; must be at least 1", "thinking")
        return thinking.budget_tokens

    def _template_variables(self) -> dict[str, Any]:
        chosen = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return chosen | (self.chat_template_kwargs or {})


def _messages(message: Mapping[str, Any], where: str) -> openai.JsonObjects:
    """Convert a message to messages of the chat API. Each tool result becomes a separate message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role is {short_repr(role)}; must be user or assistant", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where}.content must be text or a list of blocks", f"{where}.content")
    if role == "assistant":
        return [_assistant(content, f"{where}.content")]
    return _user(role, content, f"{where}.content")


def _user(role: str, blocks: openai.JsonObjects, where: str) -> openai.JsonObjects:
    messages: openai.JsonObjects = []
    others: openai.JsonObjects = []
    for position, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = _content(block.get("content") or "", f"{where}[{position}].content")
            messages.append({"role": "tool", "tool_call_id": own_id(block.get("tool_use_id")), "content": content})
        else:
            others.append(block)
    return [*messages, {"role": role, "content": _content(others, where)}] if others else messages


def _content(content: Any, where: str) -> str | openai.JsonObjects:
    """Return the text of content blocks. If some blocks are images, return all blocks in order."""
    if not isinstance(content, list) or not any(_is_picture(block) for block in content):
        return _text(content, where)
    for position, block in enumerate(content):
        if not _is_picture(block):
            _text([block], f"{where}[{position}]")
    return list(content)


def _is_picture(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _assistant(blocks: openai.JsonObjects, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for position, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, f"{where}[{position}]"))
            case _:
                texts.append(_block_text(block, f"{where}[{position}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, value = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(value, dict):
        raise InvalidRequest(f"{where} must have a name, and an input that is an object", where)
    function = {"name": name, "arguments": msgspec.json.encode(value).decode()}
    return {"id": own_id(block.get("id")), "type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    """Return the text of a string or of a list of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where} must be text or a list of blocks", where)
    return "\n".join(_block_text(block, f"{where}[{position}]") for position, block in enumerate(content))


def _block_text(block: Mapping[str, Any], where: str) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind != "text":
        raise UnsupportedFeature(f"{where} is of type {short_repr(kind)}", where)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} has no text", where)
    return text


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a tool to OpenAI's format."""
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedFeature(
            f"{where} is of type {short_repr(tool.get('type'))}; only the type 'custom' is supported", "tools"
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the format of the answer to OpenAI's `response_format`."""
    if form.get("type") != "json_schema":
        raise UnsupportedFeature(
            f"output_config.format is of type {short_repr(form.get('type'))}; must be json_schema", "output_config"
        )
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _choice(choice: Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Convert a tool choice to OpenAI's `tool_choice`."""
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest(f"tool_choice.type is {short_repr(kind)}; must be auto, any, tool or none", "tool_choice")
    return _CHOICES[kind]
