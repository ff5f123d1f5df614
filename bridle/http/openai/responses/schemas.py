"""Request bodies of the Responses API, and their conversion to conversations.

A reference to an earlier response stands for its input and output items. A reference to a conversation stands for all
of its items.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.fields import InnerFields
from bridle.http.openai.responses.input_items import as_item, messages_of
from bridle.http.openai.responses.tools import Tools, read_choice, read_tools
from bridle.http.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatBody,
    Echo,
    JsonObjects,
    ReasoningFields,
    SamplingFields,
    objects,
    text_or_objects,
)
from bridle.multimodal.modalities import reads
from bridle.safe_repr import short_repr
from bridle.serving.outputs.conversation_store import ConversationStore, ConversationTurn
from bridle.serving.outputs.response_store import ResponseStore
from bridle.tokenizer.chat_settings import ToolPrompt

#: The maximum number of entries in `metadata`, which every response repeats.
MAX_METADATA = 16


def _metadata(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"metadata has {len(value)} entries; at most {MAX_METADATA}")
    return value


Metadata = Annotated[dict[str, str] | None, BeforeValidator(_metadata)]


class ConversationFields(InnerFields):
    """The conversation that a request continues, in the object form of the field `conversation`."""

    within: ClassVar[str] = "conversation"

    id: str


class TextFields(InnerFields):
    """The field `text`: the format of the answer."""

    within: ClassVar[str] = "text"

    format: dict[str, Any] | None = None


class ResponsesBody(SamplingFields):
    """Body of `POST /v1/responses`. In addition to OpenAI's fields, the body has bridle's fields for sampling,
    controllers and constraints, as on other routes."""

    input: Annotated[str | JsonObjects, text_or_objects("input", MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[JsonObjects | None, objects("tools", MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_prompt: ToolPrompt | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    thinking_budget: int | None = None
    thinking_budget_message: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata = None
    previous_response_id: str | None = None
    conversation: str | ConversationFields | None = None
    store: bool | None = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    safety_identifier: Echo = None

    @cached_property
    def offered(self) -> Tools:
        """Return the tools of the request. Raises `InvalidRequest`."""
        return read_tools(self.tools)

    @property
    def conversation_id(self) -> str | None:
        """Return the id of the conversation that the request continues."""
        given = self.conversation
        return given.id if isinstance(given, ConversationFields) else given

    def items(self, book: ResponseStore, conversations: ConversationStore, user: str) -> JsonObjects:
        """Return all input items: the earlier items, from the conversation or the previous response, then the new
        items. Raises `UnknownResponse` or `UnknownConversation`, and `InvalidRequest` if there are too many items."""
        said = [*self._before(book, conversations, user), *self._given]
        if len(said) > MAX_MESSAGES:
            raise InvalidRequest(
                f"input and the earlier items have {len(said)} entries together; at most {MAX_MESSAGES}", "input"
            )
        return said

    def turn(self, conversations: ConversationStore, user: str) -> ConversationTurn | None:
        """Return the function that adds the request and its answer to its conversation; None without a conversation.
        Raises `UnknownConversation`, and `InvalidRequest` if the conversation is full."""
        name = self.conversation_id
        return None if name is None else conversations.begin_turn(user, name, list(map(as_item, self._given)))

    @property
    def _given(self) -> JsonObjects:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def _before(self, book: ResponseStore, conversations: ConversationStore, user: str) -> JsonObjects:
        name, conversation = self.previous_response_id, self.conversation_id
        if conversation is not None:
            if name is not None:
                raise InvalidRequest(
                    "conversation: the body has both conversation and previous_response_id; send one of them",
                    "conversation",
                )
            return conversations.find(user, conversation).listed()
        return [] if name is None else [*book.input_items(user, name), *book.response(user, name)["output"]]

    def to_chat(self, model: str, modalities: Collection[str] = (), template: str | None = None) -> ChatBody:
        """Convert this request to a chat request. The model accepts media of the kinds in `modalities` and has the chat
        template `template`. Raises `InvalidRequest` that names the invalid item, tool or field."""
        self._check()
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        if self.text is not None and self.text.format is not None:
            given["response_format"] = _format(self.text.format)
        try:
            messages = messages_of(self.instructions, self.input, bool(modalities), template)
        except UnsupportedFeature as error:
            raise UnsupportedFeature(f"{error}; {reads(model, modalities)}", error.param) from None
        return ChatBody.model_construct(
            **given,
            messages=messages,
            tools=self.offered.functions,
            tool_choice=read_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            tool_prompt=self.tool_prompt,
            reasoning=self.reasoning,
            thinking_budget=self.thinking_budget,
            thinking_budget_message=self.thinking_budget_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _check(self) -> None:
        """Raise `UnsupportedFeature` or `InvalidRequest` for options that this server does not support."""
        if self.n is not None and self.n != 1:
            raise InvalidRequest(f"n is {self.n}; must be 1, because a response has one answer", "n")
        if self.prompt is not None:
            raise UnsupportedFeature(
                "prompt is not supported, because this server stores no prompts; send all items as input", "prompt"
            )
        if self.background:
            raise UnsupportedFeature(
                "background is true; this server does not support background responses. Leave background out",
                "background",
            )
        if self.truncation not in (None, "disabled"):
            raise UnsupportedFeature(f"truncation is {short_repr(self.truncation)}; must be 'disabled'", "truncation")
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise InvalidRequest(f"max_tool_calls is {self.max_tool_calls}; must be at least 1", "max_tool_calls")
        if self.top_logprobs:
            raise UnsupportedFeature(
                "top_logprobs is not supported on this route; use /v1/chat/completions", "top_logprobs"
            )


class CompactBody(ResponsesBody):
    """Body of `POST /v1/responses/compact`."""

    model: str
    input: Annotated[str | JsonObjects, text_or_objects("input", MAX_MESSAGES)] = Field(default_factory=list)


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the format of the answer to the chat API's `response_format`."""
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return {"type": form.get("type")}
