"""Types of the options that calls of `LLM` accept besides their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from bridle.engine.request import StoppingCriteria
from bridle.sampling import SamplingParams
from bridle.sampling_values import Watermark
from bridle.structured_output.spec import Constraint
from bridle.tokenizer.chat_settings import ToolPrompt

Message = Mapping[str, Any]
Sampling = SamplingParams | Sequence[SamplingParams] | None
#: The name of an adapter for all prompts, or one for each; None is the model without an adapter.
Adapters = str | Sequence[str | None] | None

#: A constraint for all prompts, or one for each.
Constraints = Constraint | Mapping[str, Any] | Sequence[Constraint | Mapping[str, Any] | None] | None


class RunOptions(TypedDict, total=False):
    """Options for running a request, apart from its prompt and its sampling parameters. `constraint` is the form that
    the output must have (see `bridle.structured_output`). `controllers` steer together with `controller` and
    `constraint`. A list of lists has one list for each prompt. Waiting requests are served in the order of `priority`,
    smaller numbers first. A request ends when its `deadline` or `timeout` (both in seconds) expires. With `trace`, each
    output has its trace; if `trace` is a file name, the traces are also written to that file."""

    controller: object | None
    controllers: Sequence[object] | None
    constraint: Constraints
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None
    adapter: Adapters
    timeout: float | None
    priority: int
    deadline: float | None
    tenant: str
    trace: bool | str | PathLike[str]


class ChatOptions(TypedDict, total=False):
    """Options for rendering a conversation and parsing the model's answer. `tools` are functions in OpenAI's format.
    `tool_choice` is `none`, `auto`, `required`, the name of a function, or OpenAI's object. A reasoning model reasons
    for at most `thinking_budget` tokens. When the model has used up this budget, `thinking_budget_message` is appended.
    If the chat template cannot show tools, `tool_prompt` says whether they are described in the prompt (`describe`) or
    refused (`refuse`). `chat_template_kwargs` are additional variables for the chat template. With
    `continue_final_message`, the model continues the last message, which must be the assistant's.
    `add_generation_prompt` False means the same as `continue_final_message`."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    thinking_budget: int | None
    thinking_budget_message: str | None
    tool_prompt: ToolPrompt | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None


class ConstraintOptions(TypedDict, total=False):
    """The form that the output must have, under the names that servers use for it."""

    regex: str | None
    choice: Sequence[str] | None
    grammar: str | Mapping[str, Any] | None
    json_schema: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    guided_json: str | Mapping[str, Any] | None
    ebnf: str | None


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams`, which override the fields of the call's `sampling`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    n: int
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Sequence[str]
    dry_breaker_ids: Sequence[int]
    logit_bias: Mapping[Any, float] | None
    bias_texts: Sequence[tuple[str, float]]
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]]
    banned_phrases: str | Sequence[str] | None
    watermark: Watermark | bool | Mapping[str, float] | None
    logprobs: int | None
    logprobs_mode: Literal["raw", "processed"]
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    speculate: int | str | None
    prediction: str
    prediction_ids: Sequence[int]
    canonical: Literal["strict", "prefer", "off"]
    constraint_report: bool
    constraint_floor: float | None
    on_constraint_floor: Literal["flag", "refuse", "rewind"]
    lookahead: int
    aligned: int
    token_healing: bool
    describe_constraint: bool
    control_vectors: Mapping[str, float] | None
    probes: str | Sequence[str] | None
    keep_best: int


class GenerateOptions(RunOptions, ConstraintOptions, SamplingOptions, total=False):
    """The keywords of `generate` and `stream`."""


class ChatCallOptions(ChatOptions, GenerateOptions, total=False):
    """The keywords of `chat` and `session`."""
