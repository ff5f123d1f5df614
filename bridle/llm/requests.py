"""Makes checked requests from the arguments of a call, one for each prompt. Runs nothing but the compilers of
constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypedDict

from bridle.constraints.spec import Constraint
from bridle.controllers.composition import compose, parts_of
from bridle.engine.intake import check_task
from bridle.engine.request import Request
from bridle.errors import UnsupportedFeature
from bridle.llm import inputs
from bridle.llm.inputs import Prompt
from bridle.llm.options import How
from bridle.llm.traces import is_traced
from bridle.media import Source
from bridle.sampling import SamplingParams
from bridle.service import LoadedModel, OutputCollector, build_request
from bridle.service.requests import Wanted
from bridle.service.terms import Terms

NO_CONTROL = "this model has no runtime for Wasm controllers; load it with LLM(..., control=True)"


def make_collectors(
    model: LoadedModel,
    given: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    media: Any,
    how: How,
) -> list[OutputCollector]:
    """A checked request for each prompt, in the object that will collect its events."""
    items = inputs.as_given(given)
    beside = map(inputs.as_pictures, inputs.per_prompt(media, len(items), "multi_modal_data"))
    return [
        OutputCollector(
            one.request(model, item.prompt, pictures=(*item.pictures, *more)),
            item.prompt if isinstance(item.prompt, str) else None,
        )
        for item, more, one in zip(items, beside, each_of(model, sampling, how, len(items)), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class One:
    """How one request of a call is run."""

    sampling: SamplingParams
    controller: object | None
    constraint: Constraint | Mapping[str, Any] | None
    adapter: str | None
    how: How

    def request(
        self,
        model: LoadedModel,
        prompt: str | Sequence[int],
        wanted: Wanted | None = None,
        *,
        pictures: Sequence[Source] = (),
    ) -> Request:
        """The checked request; its pictures belong to the prompt's placeholders, or are in their places already."""
        beside: Wanted = {**(wanted or {}), "trace": is_traced(self.how)}
        return build_request(
            model,
            prompt,
            self.sampling,
            controller=self.controller,
            constraint=self.constraint,
            adapter=self.adapter,
            stopping=inputs.as_criteria(self.how.get("stopping_criteria")),
            pictures=pictures,
            policies=model.demands(self.adapter, self.how.get("tenant", "")),
            **beside,
            **run_options(self.how),
        )


class RunOptions(TypedDict):
    """Those of a request's options that every kind of call takes."""

    timeout: float | None
    terms: Terms
    tenant: str


def run_options(how: How) -> RunOptions:
    """How long a request may take, when its turn is, and whose it is."""
    return {
        "timeout": how.get("timeout"),
        "terms": Terms(how.get("priority", 0), how.get("deadline")),
        "tenant": how.get("tenant", ""),
    }


def each_of(
    model: LoadedModel, sampling: SamplingParams | Sequence[SamplingParams], how: How, num_prompts: int
) -> list[One]:
    """What a call says of each of its prompts. Raises `UnsupportedFeature` if the model generates none."""
    check_task(model.info, embeds=False)
    outer = inputs.per_prompt(how.get("controller"), num_prompts, "controller")
    crews = inputs.crews(how.get("controllers"), num_prompts)
    controllers = [compose(one, *crew) for one, crew in zip(outer, crews, strict=True)]
    parts = [part for each in controllers for part in parts_of(each)]
    if model.control is None and any(type(part).__name__ == "WasmController" for part in parts):
        raise UnsupportedFeature(NO_CONTROL, "controller")
    adapters: list[Any] = inputs.per_prompt(how.get("adapter"), num_prompts, "adapter")
    found = zip(
        map(inputs.as_sampling, inputs.per_prompt(sampling, num_prompts, "sampling")),
        controllers,
        inputs.per_prompt(how.get("constraint"), num_prompts, "constraint"),
        [inputs.as_name(adapter, "adapter") for adapter in adapters],
        strict=True,
    )
    return [One(*each, how) for each in found]


def start_compiling(model: LoadedModel, collectors: Sequence[OutputCollector]) -> list[Future[Any]]:
    """Begin to compile all constraints, so that one that cannot be used is known before any request runs."""
    pool = model.constraints
    steering = [part for collector in collectors for part in parts_of(collector.request.controller)]
    return [pool.compiler.compile(each) for each in steering if isinstance(each, Constraint)] if pool else []
