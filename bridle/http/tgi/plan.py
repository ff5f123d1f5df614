"""Converts the parameters of a request of text-generation-inference's API to the engine's parameters.

The rules are the original server's: sampling is on if `do_sample` or any parameter that only sampling uses is given;
otherwise decoding is greedy. Values that disable a filter are accepted, although the original server refuses them, and
do not turn sampling on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridle.errors import InvalidRequest
from bridle.http.tgi.schemas import Grammar, Parameters
from bridle.sampling import SamplingParams, fields_on, meanings
from bridle.serving import LoadedModel
from bridle.serving.requests.sampling_defaults import filled
from bridle.serving.requests.steering import ignores_eos
from bridle.structured_output import Constraint, parse
from bridle.structured_output.request_fields import native_form

MAX_BEST_OF = 16
MAX_TOP_TOKENS = 20

#: Parameters that only sampling uses, and the values that disable them. Such a value does not turn sampling on.
_SAMPLED: dict[str, float | None] = {
    "temperature": None,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "min_p": 0.0,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
}
_MAX_FREQUENCY_PENALTY = 2.0
_PASSED = tuple(name for name in fields_on("tgi") if name != "ignore_eos")  # `ignore_eos` has its own rule


@dataclass(frozen=True, slots=True)
class Plan:
    """The engine's parameters for a request, and the contents of its response. The response has `num_top` alternatives
    of each token, and the prompt's tokens if `wants_prefill`. The model gets only the last `truncate` tokens of the
    prompt."""

    sampling: SamplingParams
    best_of: int
    num_top: int
    wants_details: bool
    wants_prefill: bool
    wants_full_text: bool
    truncate: int | None
    constraint: Constraint | None


def plan_of(given: Parameters, is_stream: bool, full_text: bool = False) -> Plan:
    """Validate the parameters `given`, and convert them to a plan. `full_text` is the default of `return_full_text`.
    Raises `InvalidRequest`."""
    best_of = _best_of(given, is_stream)
    num_top = _within("top_n_tokens", given.top_n_tokens or 0, 0, MAX_TOP_TOKENS)
    wants_prefill = bool(given.decoder_input_details)
    if wants_prefill and is_stream:
        raise InvalidRequest("decoder_input_details is not possible with stream", "decoder_input_details")
    wants_full = given.return_full_text
    return Plan(
        sampling=_sampling(given, best_of, num_top, wants_prefill),
        best_of=best_of,
        num_top=num_top,
        wants_details=bool(given.details) or wants_prefill,
        wants_prefill=wants_prefill,
        wants_full_text=full_text if wants_full is None else wants_full,
        truncate=given.truncate,
        constraint=_constraint(given),
    )


def check_truncate(plan: Plan, model: LoadedModel) -> None:
    """Raise `InvalidRequest` if `truncate` is below 1 or above the maximum length of a prompt."""
    if plan.truncate is not None:
        _within("truncate", plan.truncate, 1, max_input_tokens(model))


def settled(plan: Plan, given: Parameters, model: LoadedModel) -> SamplingParams:
    """Return the sampling parameters. Omitted parameters get the values that the model's checkpoint recommends. If
    `do_sample` is false, decoding is greedy, and the recommended temperature is not used."""
    names = {own: meaning.names.get("tgi", own) for own, meaning in meanings().items()}
    said = {own for own, name in names.items() if name is not None and getattr(given, name, None) is not None}
    if given.do_sample is False:
        said.add("temperature")
    return filled(plan.sampling, model.defaults, said)


def max_input_tokens(model: LoadedModel) -> int:
    """Return the maximum prompt length in tokens that leaves space for one output token."""
    return min(model.batching.max_input_tokens, model.max_sequence_tokens - 1)


def _sampling(given: Parameters, best_of: int, num_top: int, wants_prefill: bool) -> SamplingParams:
    values: dict[str, Any] = {name: getattr(given, name) for name in _PASSED}
    values = {name: value for name, value in values.items() if value is not None}
    if "seed" in values and values["seed"] < 0:
        raise InvalidRequest(f"seed is {values['seed']}; must be at least 0", "seed")
    for name in ("temperature", "repetition_penalty"):
        if name in values and not values[name] > 0:
            raise InvalidRequest(
                f"{name} is {values[name]}; must be more than 0. To use the default, leave {name} out", name
            )
    if not values.get("top_k", 0) >= 0:
        raise InvalidRequest(f"top_k is {values['top_k']}; must be at least 1, or 0 to turn it off", "top_k")
    if not abs(values.get("frequency_penalty", 0.0)) <= _MAX_FREQUENCY_PENALTY:
        raise InvalidRequest(
            f"frequency_penalty is {values['frequency_penalty']}; must be between -2 and 2", "frequency_penalty"
        )
    if given.max_new_tokens is not None and given.max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens is {given.max_new_tokens}; must be at least 1", "max_new_tokens")
    if not is_sampled(given):
        values["temperature"] = 0.0
    values["ignore_eos"] = ignores_eos(given, given.ignore_eos)
    return SamplingParams(
        n=best_of,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens or 0,
        logprobs=num_top,
        keep_best=0 if best_of == 1 or given.details or wants_prefill else 1,  # details contain the other outputs
        prompt_logprobs=0 if wants_prefill else None,
        include_stop_str_in_output=True,
        **values,
    )


def is_sampled(given: Parameters) -> bool:
    """Return whether the parameters `given` turn sampling on."""
    return bool(given.do_sample) or any(getattr(given, name) not in (None, off) for name, off in _SAMPLED.items())


def _best_of(given: Parameters, is_stream: bool) -> int:
    best_of = 1 if given.best_of is None else _within("best_of", given.best_of, 1, MAX_BEST_OF)
    if best_of == 1:
        return best_of
    if is_stream:
        raise InvalidRequest(
            f"best_of is {best_of}, which is not possible with stream: the best output is known only at the end",
            "best_of",
        )
    if not is_sampled(given):
        raise InvalidRequest(f"best_of is {best_of}, which needs sampling: set do_sample or temperature", "best_of")
    if given.seed is not None:
        raise InvalidRequest(f"best_of is {best_of}, which cannot be combined with a seed", "seed")
    return best_of


def _constraint(given: Parameters) -> Constraint | None:
    if given.grammar is not None and given.constraint is not None:
        raise InvalidRequest("the body has both grammar and constraint; send one of them", "constraint")
    if given.constraint is not None:
        return parse(given.constraint)
    return None if given.grammar is None else _of_grammar(given.grammar)


def _of_grammar(grammar: Grammar) -> Constraint:
    try:
        return native_form(grammar.type, grammar.value)
    except InvalidRequest as error:
        error.param = "grammar"
        raise


def _within(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; must be between {low} and {high}", name)
    return value
