"""Makes checked requests from the arguments of a call, one for each prompt. Runs nothing but the compilers of
constraints."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from bridle.constraints.spec import Constraint
from bridle.engine.request import Request
from bridle.errors import UnsupportedFeature
from bridle.llm import inputs
from bridle.llm.inputs import Prompt
from bridle.llm.options import How
from bridle.sampling import SamplingParams
from bridle.service import LoadedModel, OutputCollector, build_request
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
    inputs.refuse_media(media)
    items = inputs.as_prompts(given)
    params = inputs.per_prompt(sampling, len(items), "sampling")
    controllers = inputs.per_prompt(how.get("controller"), len(items), "controller")
    constraints = inputs.per_prompt(how.get("constraint"), len(items), "constraint")
    adapters: list[Any] = inputs.per_prompt(how.get("adapter"), len(items), "adapter")
    steering = zip(controllers, constraints, adapters, strict=True)
    requests = [
        _make_request(model, item, inputs.as_sampling(one), given, how)
        for item, one, given in zip(items, params, steering, strict=True)
    ]
    texts = [item if isinstance(item, str) else None for item in items]
    return [OutputCollector(request, text) for request, text in zip(requests, texts, strict=True)]


def _make_request(
    model: LoadedModel,
    prompt: str | list[int],
    sampling: SamplingParams,
    steering: tuple[object, Any, Any],
    how: How,
) -> Request:
    controller, constraint, adapter = steering
    if model.control is None and type(controller).__name__ == "WasmController":
        raise UnsupportedFeature(NO_CONTROL, "controller")
    return build_request(
        model,
        prompt,
        sampling,
        controller=controller,
        constraint=constraint,
        adapter=inputs.as_name(adapter, "adapter"),
        stopping=inputs.as_criteria(how.get("stopping_criteria")),
        timeout=how.get("timeout"),
        terms=Terms(how.get("priority", 0), how.get("deadline")),
        tenant=how.get("tenant", ""),
    )


def start_compiling(model: LoadedModel, collectors: Sequence[OutputCollector]) -> list[Future[Any]]:
    """Begin to compile all constraints, so that one that cannot be used is known before any request runs."""
    pool = model.constraints
    steering = [collector.request.controller for collector in collectors]
    return [pool.compiler.compile(each) for each in steering if isinstance(each, Constraint)] if pool else []
