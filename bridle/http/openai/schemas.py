"""Request bodies of the OpenAI routes.

Types are strict: numbers and strings are not converted to each other. `bridle.http.fields` handles undeclared fields.
Long lists are validated by functions of this module, so that an invalid list gives one error instead of a million
errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema

from bridle.chat.conversation import Conversation, Message, continued
from bridle.engine.request import ALL_TOKENS, Retention
from bridle.errors import InvalidRequest
from bridle.http.fields import ControllerFields, Fields, InnerFields
from bridle.http.openai.sampling_fields import derived_fields
from bridle.sampling import MAX_STOP_STRINGS, SamplingParams, fields_on
from bridle.serving.models.loading import LoadedModel
from bridle.serving.requests.request_builder import EventOptions
from bridle.serving.requests.sampling_defaults import filled
from bridle.serving.requests.steering import ignores_eos
from bridle.structured_output import Constraint
from bridle.structured_output.request_fields import NAMES, constraint_named
from bridle.tokenizer.chat_settings import ToolPrompt

MAX_MESSAGES = 4_096
MAX_TOOLS = 128
#: The maximum length of a text that is returned unchanged, and of a prompt cache key.
MAX_ECHO_CHARS = 512
#: Seconds for which `prompt_cache_retention: 24h` retains a conversation's KV.
DAY = 86_400.0


def _refuse(message: str) -> ValueError:
    return ValueError(message)


def prompts(value: Any, name: str = "prompt") -> Any:
    """Convert a prompt or a list of prompts to a list of texts or a list of token id lists. `name` is the name of the
    field."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _refuse(f"{name} must be a string, a list of strings, a list of token ids or a list of such lists")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if kinds == {str}:
        return value
    if kinds == {list} and all(set(map(type, item)) <= {int} for item in value):
        return value
    raise _refuse(f"{name} must be a string, a list of strings, a list of token ids or a list of such lists")


def _stop(value: Any) -> Any:
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list):
        raise _refuse("stop must be a string or a list of strings")
    if len(values) > MAX_STOP_STRINGS:
        raise _refuse(f"stop has {len(values)} strings; at most {MAX_STOP_STRINGS}")
    if not all(isinstance(item, str) for item in values):
        raise _refuse("stop must be a string or a list of strings")
    return tuple(values)


def objects(name: str, limit: int) -> BeforeValidator:
    """Return a validator for a list of at most `limit` JSON objects."""

    def check(value: Any) -> Any:
        if value is None:
            return value
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise _refuse(f"{name} must be a list of objects")
        if len(value) > limit:
            raise _refuse(f"{name} has {len(value)} entries; at most {limit}")
        return value

    return BeforeValidator(check)


def texts(name: str) -> BeforeValidator:
    """Return a validator for a list of strings."""

    def check(value: Any) -> Any:
        if value is not None and not (isinstance(value, list) and set(map(type, value)) <= {str}):
            raise _refuse(f"{name} must be a list of strings")
        return value

    return BeforeValidator(check)


def text_or_objects(name: str, limit: int) -> BeforeValidator:
    """Return a validator for a text, or a list of at most `limit` JSON objects."""
    check = objects(name, limit).func

    def check_either(value: Any) -> Any:
        return value if isinstance(value, str) else check(value)  # type: ignore[call-arg]

    return BeforeValidator(check_either)


_TEXTS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer"}}
PROMPTS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}
Prompts = Annotated[Any, BeforeValidator(lambda value: prompts(value)), WithJsonSchema(PROMPTS_SCHEMA)]
Stop = Annotated[Any, BeforeValidator(_stop), WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]})]
JsonObjects = list[dict[str, Any]]


class ReasoningFields(InnerFields):
    """The field `reasoning`: limits on reasoning, in a format that several open-source servers share."""

    within: ClassVar[str] = "reasoning"

    enabled: bool | None = None
    max_tokens: int | None = None
    effort: str | None = None


_NO_REASONING = ReasoningFields()


def _echo(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_ECHO_CHARS:
        raise _refuse(f"has {len(value)} characters; at most {MAX_ECHO_CHARS}")
    return value


Echo = Annotated[str | None, BeforeValidator(_echo)]


class StreamOptions(InnerFields):
    """The field `stream_options`: whether a stream reports usage at its end, and whether it reports the loss of a
    device."""

    within: ClassVar[str] = "stream_options"

    include_usage: bool | None = None
    include_resuming: bool | None = None


def _predicted(value: Any) -> Any:
    """Return the text of OpenAI's `prediction`: an object with a text or with parts, or the text itself."""
    if not isinstance(value, dict):
        return value
    content = value.get("content")
    if value.get("type") != "content" or not isinstance(content, (str, list)):
        raise ValueError('prediction must be {"type": "content", "content": ...}')
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the parts of a prediction must have the type text")
    return "".join(map(str, texts))


Prediction = Annotated[
    str | None,
    BeforeValidator(_predicted),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]


if TYPE_CHECKING:
    _Derived = Fields
else:
    _Derived = derived_fields("openai")


class SamplingFields(ControllerFields, _Derived):
    """Sampling fields of all OpenAI routes, including fields of open-source servers. Further fields are derived from
    `SamplingParams`."""

    model: str | None = None
    adapter: str | None = None
    priority: int | None = None
    deadline: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stop = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    watermark: bool | dict[str, float] | None = None
    prediction: Prediction = None
    rewind: Literal["hold", "event", "mark"] | None = None
    trace: bool | str | None = None
    prompt_cache_key: Echo = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    response_format: dict[str, Any] | None = None
    constraint: dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, texts("choice")] = None
    grammar: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, texts("guided_choice")] = None
    guided_grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | None = None
    ebnf: str | None = None

    @property
    def wants_stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def cache_options(self, user: str) -> EventOptions:
        """Return the options for the prompt cache. For each `prompt_cache_key`, only the latest conversation's KV is
        retained."""
        key, name = self.prompt_cache_key or "", ""
        if key:
            name = "key-" + blake2b(f"{user}\0{key}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        wish = Retention(ALL_TOKENS, DAY, name)
        return {"cache_key": key, "retains": (wish,) if self.prompt_cache_retention == "24h" else ()}

    def form(self) -> Constraint | None:
        """Return the output constraint; None if no field sets one. Raises `InvalidRequest` that names the field."""
        if self.model_fields_set.isdisjoint(NAMES):
            return None
        return constraint_named({name: getattr(self, name) for name in NAMES})

    def sampling(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of this body. `changes` override fields of the body. Raises
        `InvalidRequest`."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        given["ignore_eos"] = ignores_eos(self, self.ignore_eos)
        return SamplingParams(**(given | changes))

    def filled(self, sampling: SamplingParams, model: LoadedModel) -> SamplingParams:
        """Return `sampling` with the values that the checkpoint recommends for fields missing in this body."""
        given = {name for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        return filled(sampling, model.defaults, given)


#: The sampling fields of all routes. A route handles fields with its own rule itself.
_SAMPLING_FIELDS = tuple(
    name for name in fields_on("openai") if name not in ("max_tokens", "logprobs", "prompt_logprobs", "ignore_eos")
)


class BeamFields(SamplingFields):
    """Fields for beam search and for log-probabilities of the prompt, on completions and chats. `best_of` is the number
    of beams."""

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None

    def width(self, num_wanted: int) -> int:
        """Return the number of choices to generate for `num_wanted` answers. Raises `InvalidRequest` for values that
        streams do not support, and for fields of beam search without `use_beam_search`."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs}, which is not possible with stream", "prompt_logprobs"
            )
        if self.stream and self.use_beam_search:
            raise InvalidRequest(
                "use_beam_search is true, which is not possible with stream: the best outputs are known only at the "
                "end",
                "use_beam_search",
            )
        for name in () if self.use_beam_search else ("length_penalty", "early_stopping"):
            if (value := getattr(self, name)) not in (None, False, 1.0):
                raise InvalidRequest(f"{name} is {value!r}; it needs use_beam_search", name)
        width = self.best_of or num_wanted
        if width < num_wanted:
            raise InvalidRequest(f"best_of is {width}; must be at least n ({num_wanted})", "best_of")
        return width


class CompletionBody(BeamFields):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(BeamFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[JsonObjects, objects("messages", MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[JsonObjects | None, objects("tools", MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_prompt: ToolPrompt | None = None
    thinking_budget: int | None = None
    thinking_budget_message: str | None = None
    reasoning: ReasoningFields | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def conversation(self, prefill: str = "") -> Conversation:
        """Return the conversation, with the settings for its answer. The answer begins with `prefill`. Raises
        `InvalidRequest`."""
        reasoning = self.reasoning or _NO_REASONING
        messages: Sequence[Message] = self.messages
        begun = ""
        if self.continue_final_message or self.add_generation_prompt is False:
            messages, begun = continued(messages, self.continue_final_message, self.add_generation_prompt)
        return Conversation(
            messages,
            self.tools,
            self.tool_choice,
            self.parallel_tool_calls,
            thinking_budget=reasoning.max_tokens if self.thinking_budget is None else self.thinking_budget,
            thinking_budget_message=self.thinking_budget_message,
            is_thinking=reasoning.enabled,
            effort=self.reasoning_effort or reasoning.effort,
            variables=self.chat_template_kwargs or {},
            prefill=begun or prefill,
            tool_prompt=self.tool_prompt,
        )
