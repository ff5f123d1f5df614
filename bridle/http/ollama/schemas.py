"""Request bodies of Ollama's API. Bodies of routes that generate also have bridle's fields for sampling, controllers
and constraints, at the top level or in `options`."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from bridle.errors import InvalidRequest
from bridle.http.fields import InnerFields
from bridle.http.ollama.messages import to_messages, to_response_format, to_tools, with_images
from bridle.http.ollama.options import DEFAULTS
from bridle.http.openai.embeddings import TextsBody
from bridle.http.openai.schemas import MAX_MESSAGES, MAX_TOOLS, ChatBody, JsonObjects, SamplingFields, objects, texts
from bridle.safe_repr import short_repr
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel
from bridle.serving.requests.sampling_defaults import filled
from bridle.tokenizer.chat_settings import ToolPrompt

_LEVELS = ("low", "medium", "high", "max")
_DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d+)?")
_MAX_TOP = 20


def _keep_alive(value: Any) -> Any:
    """Validate a duration in Go's notation, or a number of seconds."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and len(value) <= 40 and _DURATION.fullmatch(value):
        return value
    raise ValueError(f"keep_alive is {short_repr(value)}; must be a number of seconds or a duration such as '5m'")


KeepAlive = Annotated[Any, BeforeValidator(_keep_alive)]


def is_zero(keep_alive: Any) -> bool:
    """Return whether `keep_alive` is zero, which asks to unload the model."""
    return keep_alive is not None and not re.search(r"[1-9]", str(keep_alive))


class GeneratingBody(SamplingFields):
    """Fields of both `/api/chat` and `/api/generate`."""

    format: Any = None
    keep_alive: KeepAlive = None
    think: bool | str | None = None
    thinking_budget: int | None = None
    thinking_budget_message: str | None = None
    tool_prompt: ToolPrompt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    num_ctx: Annotated[int | None, Field(ge=1)] = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def streams(self) -> bool:
        """Return whether the answer is streamed, which is the default."""
        return self.stream is not False

    def check(self) -> None:
        """Raise `InvalidRequest` for fields that contradict each other."""
        if self.n is not None and self.n != 1:
            raise InvalidRequest(f"n is {self.n}; must be 1, because this API returns one answer", "n")
        if not 0 <= (self.top_logprobs or 0) <= _MAX_TOP:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}; must be between 0 and {_MAX_TOP}", "top_logprobs"
            )
        if isinstance(self.think, str) and self.think not in _LEVELS:
            raise InvalidRequest(
                f"think is {short_repr(self.think)}; must be true, false or one of {', '.join(_LEVELS)}", "think"
            )

    def drawn(self, model: LoadedModel) -> SamplingParams:
        """Return the sampling parameters. The defaults are the checkpoint's recommendations, or else Ollama's
        defaults."""
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self.sampling(max_tokens=self.max_tokens, logprobs=num_logprobs)
        defaults = {**DEFAULTS, **model.defaults}
        return filled(sampling, defaults, {name for name in defaults if getattr(self, name, None) is not None})

    def to_chat(
        self,
        messages: JsonObjects,
        tools: JsonObjects | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> ChatBody:
        """Convert this request to a body of the OpenAI chat API."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        given["response_format"] = to_response_format(self.format) or self.response_format
        given["stream"] = self.streams
        thinking = {} if self.think is None else {"enable_thinking": self.think is not False}
        return ChatBody.model_construct(
            **given,
            messages=messages,
            tools=to_tools(tools),
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            tool_prompt=self.tool_prompt,
            thinking_budget=self.thinking_budget,
            thinking_budget_message=self.thinking_budget_message,
            chat_template_kwargs=thinking | (self.chat_template_kwargs or {}),
            reasoning_effort=self.think if isinstance(self.think, str) else None,
        )


class OllamaChatBody(GeneratingBody):
    """Body of `POST /api/chat`. Without messages, the request loads or unloads the model. The field `system`, which
    Open WebUI sends, counts only if the messages have no system message."""

    messages: Annotated[JsonObjects | None, objects("messages", MAX_MESSAGES)] = None
    system: str | None = None
    tools: Annotated[JsonObjects | None, objects("tools", MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def chat(self) -> ChatBody:
        messages = to_messages(self.messages or [])
        if self.system and not any(message.get("role") == "system" for message in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return self.to_chat(messages, self.tools, self.tool_choice, self.parallel_tool_calls)


class OllamaGenerateBody(GeneratingBody):
    """Body of `POST /api/generate`. Without a prompt, the request loads or unloads the model."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: Annotated[list[str] | None, texts("images")] = None

    def check(self) -> None:
        super().check()
        if self.template:
            raise InvalidRequest(
                "template is not supported: the server uses the model's chat template. To write the whole prompt "
                "yourself, set raw",
                "template",
            )
        if self.raw and (self.system or self.context):
            raise InvalidRequest("raw mode does not support template, system, or context", "raw")
        if self.images and (self.raw or self.context or self.suffix):
            raise InvalidRequest("images cannot be combined with raw, context or suffix; leave those out", "images")

    @property
    def is_plain(self) -> bool:
        """Return whether the model gets the prompt without its chat template."""
        return bool(self.raw or self.suffix)

    def chat(self) -> ChatBody:
        messages: JsonObjects = [{"role": "system", "content": self.system}] if self.system else []
        content = with_images(self.prompt or "", self.images, "the prompt")
        return self.to_chat([*messages, {"role": "user", "content": content}])


class EmbedBody(TextsBody):
    """Body of `POST /api/embed`."""

    must_name: ClassVar[bool] = True

    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None
    num_ctx: int | None = None  # texts are cut to the model's context
    keep_alive: KeepAlive = None

    def texts(self) -> list[str]:
        """Return the texts to embed. Raises `InvalidRequest`."""
        found = [self.input] if isinstance(self.input, str) else self.input
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise InvalidRequest(f"input is {short_repr(self.input)}; must be a string or a list of strings", "input")
        return found


class EmbeddingsBody(TextsBody):
    """Body of `POST /api/embeddings`, the older route for one text."""

    must_name: ClassVar[bool] = True

    prompt: str
    num_ctx: int | None = None
    keep_alive: KeepAlive = None


class NameBody(InnerFields):
    """A body with the name of a model. `name` is an older name of the field `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None

    def required(self) -> str:
        """Return the model's name. Raises `InvalidRequest`."""
        name = self.model or self.name
        if not name or len(name) > 500:
            raise InvalidRequest("model is required; must be a name of at most 500 characters", "model")
        return name
