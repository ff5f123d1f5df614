"""The types of the options that calls of `LLM` take beside their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from bridle.engine.request import StoppingCriteria
from bridle.sampling import SamplingParams
from bridle.structured_output.spec import Constraint

Message = Mapping[str, Any]
Sampling = SamplingParams | Sequence[SamplingParams] | None
#: The name of an adapter for all prompts, or one for each; None is the model without any.
Adapters = str | Sequence[str | None] | None

#: A constraint for all prompts, or one for each.
Constraints = Constraint | Mapping[str, Any] | Sequence[Constraint | Mapping[str, Any] | None] | None


class RunOptions(TypedDict, total=False):
    """Options for running a request, besides its prompt and sampling. `constraint` is the required form of the
    output (see `bridle.structured_output`). `controllers` steer together with `controller` and `constraint`; a list
    of lists has one list per prompt. Requests wait in the order of `priority`, smaller numbers first; a `deadline`
    or a `timeout`, both in seconds, ends them when it expires. With `trace` each output has its trace; a file name
    also writes it there."""

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
    """Options for rendering a conversation and parsing the answer. `tools` are functions in OpenAI's shape;
    `tool_choice` is `none`, `auto`, `required`, a function's name, or OpenAI's object. A reasoning model reasons
    for `thinking_budget` tokens at most. `chat_template_kwargs` are further variables of the template. With
    `continue_final_message` the model continues the last message, the assistant's; `add_generation_prompt` may say
    the same."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    thinking_budget: int | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None
