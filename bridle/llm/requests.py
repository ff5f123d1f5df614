"""Creates checked requests from the arguments of a call, one for each prompt. This module runs no requests; it only
runs the compilers of constraints. The module also completes and writes the traces that a call requests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridle.controllers.composition import compose, parts_of
from bridle.engine.input_processor import check_task
from bridle.engine.request import Request, StoppingCriteria
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.llm import arguments
from bridle.llm.arguments import Prompt
from bridle.llm.options import RunOptions
from bridle.multimodal import Source
from bridle.outputs import RequestOutput
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel, OutputCollector
from bridle.serving.lifecycle.in_process import InProcessServing
from bridle.serving.requests.request_builder import EventOptions
from bridle.serving.requests.steering import PLAIN, Steering
from bridle.serving.tracing.trace_header import traces_of
from bridle.structured_output.spec import Constraint, parse
from bridle.traces import write

NO_CONTROL = "this model has no runtime for Wasm controllers; load it with LLM(..., control=True)"
#: No options in addition to prompt and sampling.
PLAINLY: EventOptions = {}


def make_collectors(
    model: LoadedModel,
    given: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    media: Any,
    how: RunOptions,
) -> list[OutputCollector]:
    """Return one collector for each prompt; each has a checked request."""
    items = arguments.as_given(given)
    beside = map(arguments.as_pictures, arguments.per_prompt(media, len(items), "multi_modal_data"))
    return [
        OutputCollector(
            one.request(item.prompt, pictures=(*item.pictures, *more)),
            item.prompt if isinstance(item.prompt, str) else None,
        )
        for item, more, one in zip(items, beside, each_of(model, sampling, how, len(items)), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Options for one request of a call."""

    serving: InProcessServing
    sampling: SamplingParams
    steering: Steering
    adapter: str | None
    stopping: tuple[StoppingCriteria, ...] = ()
    trace: bool = False

    def request(
        self, prompt: str | Sequence[int], wanted: EventOptions = PLAINLY, *, pictures: Sequence[Source] = ()
    ) -> Request:
        """Return the checked request. The images in `pictures` belong to the placeholders of the prompt in order,
        unless `wanted` already has their positions."""
        beside: EventOptions = {**wanted, "trace": self.trace}
        return self.serving.request(
            prompt,
            self.sampling,
            self.steering,
            adapter=self.adapter,
            stopping=self.stopping,
            pictures=pictures,
            **beside,
        )


def serving_of(model: LoadedModel, how: RunOptions) -> InProcessServing:
    """Return the options that the requests of a call share: the user, the priority and the time limits."""
    return InProcessServing(
        model,
        user=how.get("tenant", ""),
        priority=how.get("priority"),
        deadline=how.get("deadline"),
        timeout=how.get("timeout"),
    )


def each_of(
    model: LoadedModel, sampling: SamplingParams | Sequence[SamplingParams], how: RunOptions, num_prompts: int
) -> list[PromptSpec]:
    """Return the request options for each prompt of a call. Raises `UnsupportedFeature` if the model does not
    generate."""
    check_task(model.info, embeds=False)
    outer = arguments.per_prompt(how.get("controller"), num_prompts, "controller")
    crews = arguments.crews(how.get("controllers"), num_prompts)
    controllers = [compose(one, *crew) for one, crew in zip(outer, crews, strict=True)]
    parts = [part for each in controllers for part in parts_of(each)]
    if model.control is None and any(type(part).__name__ == "WasmController" for part in parts):
        raise UnsupportedFeature(NO_CONTROL, "controller")
    adapters: list[Any] = arguments.per_prompt(how.get("adapter"), num_prompts, "adapter")
    constraints = arguments.per_prompt(how.get("constraint"), num_prompts, "constraint")
    serving, stopping = serving_of(model, how), arguments.as_criteria(how.get("stopping_criteria"))
    found = zip(
        map(arguments.as_sampling, arguments.per_prompt(sampling, num_prompts, "sampling")),
        map(_steering, controllers, constraints),
        [arguments.as_name(adapter, "adapter") for adapter in adapters],
        strict=True,
    )
    return [PromptSpec(serving, *each, stopping, is_traced(how)) for each in found]


def _steering(controller: object | None, constraint: Constraint | Mapping[str, Any] | None) -> Steering:
    """Return the controllers and the constraint of one request, from the arguments of a call."""
    if constraint is None:
        return PLAIN if controller is None else Steering(controller)
    return Steering(controller, parse(constraint))


def start_compiling(model: LoadedModel, collectors: Sequence[OutputCollector]) -> list[Future[Any]]:
    """Begin to compile all constraints. So an unusable constraint raises an error before any request runs."""
    pool = model.constraints
    steering = [part for collector in collectors for part in parts_of(collector.request.controller)]
    return [pool.compiler.compile(each) for each in steering if isinstance(each, Constraint)] if pool else []


def is_traced(given: Mapping[str, Any]) -> bool:
    """Return whether a call requests traces. Raises `InvalidRequest` if the value is neither a boolean nor a file
    name."""
    wish = given.get("trace")
    if not isinstance(wish, (bool, str, os.PathLike, type(None))):
        raise InvalidRequest(f"trace is {wish!r}; must be True, False or the name of a file", "trace")
    return bool(wish)


def keep_traces(model: LoadedModel, outputs: Iterable[RequestOutput], given: Mapping[str, Any]) -> None:
    """Complete the traces of finished outputs, and write them to a file if the call names one."""
    traces = traces_of(model, outputs)
    if traces and isinstance(given["trace"], (str, os.PathLike)):
        write(traces, Path(given["trace"]))
