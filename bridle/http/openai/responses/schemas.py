"""Bodies of the Responses API, and the conversation that each is converted to.

A reference to an earlier response stands for the items that it answered, and its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from bridle.chat.tools.pieces import own_id
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.fields import InnerFields
from bridle.http.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatBody,
    JsonObjects,
    ReasoningFields,
    SamplingFields,
    objects,
    text_or_objects,
)
from bridle.media.modalities import reads
from bridle.service.response_book import ResponseBook
from bridle.shown import shown

#: How many entries `metadata` may have, which is returned with every answer.
MAX_METADATA = 16
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _metadata(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"metadata has {len(value)} entries; at most {MAX_METADATA}")
    return value


class TextFields(InnerFields):
    """The form of the answer."""

    within: ClassVar[str] = "text"

    format: dict[str, Any] | None = None


class ResponsesBody(SamplingFields):
    """`POST /v1/responses`. Beside OpenAI's fields it takes those that the other routes have for sampling, controllers
    and constraints."""

    input: Annotated[str | JsonObjects, text_or_objects("input", MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[JsonObjects | None, objects("tools", MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_metadata)] = None
    previous_response_id: str | None = None
    store: bool | None = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None

    def items(self, book: ResponseBook, user: str) -> JsonObjects:
        """All that is said: what the earlier response answered, its own items, and the input. Raises `UnknownResponse`,
        and `InvalidRequest` if that is too much."""
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        name = self.previous_response_id
        if name is None:
            return given
        said = [*book.input_items(user, name), *book.response(user, name)["output"], *given]
        if len(said) > MAX_MESSAGES:
            raise InvalidRequest(f"with those before, input has {len(said)} entries; at most {MAX_MESSAGES}", "input")
        return said

    def to_chat(self, model: str, modalities: Collection[str] = ()) -> ChatBody:
        """The same as a chat with `model`, which reads files of `modalities`. Raises `InvalidRequest` that names the
        item, the tool or the field."""
        self._check()
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        if self.text is not None and self.text.format is not None:
            given["response_format"] = _format(self.text.format)
        try:
            messages = _messages(self.instructions, self.input, bool(modalities))
        except UnsupportedFeature as error:
            raise UnsupportedFeature(f"{error}; {reads(model, modalities)}", error.param) from None
        return ChatBody.model_construct(
            **given,
            messages=messages,
            tools=None if self.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning=self.reasoning,
            thinking_budget=self.thinking_budget,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _check(self) -> None:
        """Refuse options that this server could not honour."""
        if self.n is not None and self.n != 1:
            raise InvalidRequest(f"n is {self.n}; a response has one answer", "n")
        if self.prompt is not None:
            raise UnsupportedFeature("prompt is given, but none are kept here; send all items", "prompt")
        if self.background:
            raise UnsupportedFeature("background is true; an answer is computed while its client waits", "background")
        if self.truncation not in (None, "disabled"):
            raise UnsupportedFeature(f"truncation is {shown(self.truncation)}; must be 'disabled'", "truncation")
        if self.top_logprobs:
            raise UnsupportedFeature("top_logprobs is for /v1/chat/completions", "top_logprobs")


def _messages(instructions: str | None, items: str | JsonObjects, has_files: bool) -> JsonObjects:
    messages: JsonObjects = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for position, item in enumerate(items):
        _add_item(messages, item, f"input[{position}]", _content if has_files else _text)
    return messages


def _add_item(
    messages: JsonObjects, item: Mapping[str, Any], where: str, read: Callable[[Any, str], str | JsonObjects]
) -> None:
    """Add one item to the messages, whose content is `read`. Thoughts, text and calls of a turn become one message."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str):
                raise InvalidRequest(
                    f"{where}.role is {shown(role)}; must be user, assistant, system or developer", where
                )
            if role == "assistant":
                _turn(messages)["content"] += _text(item.get("content"), f"{where}.content")
            else:
                messages.append({"role": role, "content": read(item.get("content"), f"{where}.content")})
        case "reasoning":
            thoughts = _text(item.get("content") or item.get("summary") or "", where)
            turn = _turn(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
        case "function_call":
            if not isinstance(item.get("name"), str):
                raise InvalidRequest(f"{where}.name is {shown(item.get('name'))}; must be a function's name", where)
            function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
            call = {"id": own_id(item.get("call_id")), "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            result = read(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": own_id(item.get("call_id")), "content": result})
        case kind:
            raise UnsupportedFeature(f"{where} is of type {shown(kind)}", where)


def _turn(messages: JsonObjects) -> dict[str, Any]:
    """The assistant's message that is being built."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Any, where: str) -> str | JsonObjects:
    """The text of parts; the parts themselves, in order, where some are pictures or sounds."""
    if not isinstance(content, list) or not any(_is_file(part) for part in content):
        return _text(content, where)
    for position, part in enumerate(content):
        if not _is_file(part):
            _text([part], f"{where}[{position}]")
    return list(content)


def _is_file(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_image", "input_audio")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequest(f"{where} must be text or a list of parts", where)
    return "\n".join(_part_text(part, f"{where}[{position}]") for position, part in enumerate(content))


def _part_text(part: Mapping[str, Any], where: str) -> str:
    if part.get("type") not in _TEXTS:
        raise UnsupportedFeature(f"{where} is of type {shown(part.get('type'))}", where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where} has no text", where)
    return str(part["text"])


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool in the shape of the chat API."""
    if tool.get("type") != "function":
        raise UnsupportedFeature(f"{where} is of type {shown(tool.get('type'))}; only functions are known", "tools")
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    """The form of an answer in the shape of the chat API."""
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return {"type": form.get("type")}
