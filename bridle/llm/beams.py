"""Beam search for `LLM`: the requests that search, and the texts that they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridle.controllers.beams import BEAMS, EarlyStopping
from bridle.errors import InvalidRequest
from bridle.llm import arguments
from bridle.llm.arguments import Prompt
from bridle.llm.calls import Calls
from bridle.llm.kwargs import settle
from bridle.llm.requests import make_collectors
from bridle.outputs import RequestOutput
from bridle.sampling import DEFAULT_SAMPLING
from bridle.serving import raise_first_error
from bridle.serving.lifecycle.beam_search import beam_search, found_beams


@dataclass(frozen=True, slots=True)
class Search:
    """How wide and how long a search is, and what it takes for the best text."""

    beam_width: int
    max_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping


def found_by_beams(
    calls: Calls, prompts: Prompt | Sequence[Prompt], search: Search, use_tqdm: bool, given: Mapping[str, Any]
) -> list[RequestOutput]:
    """The likeliest texts of each prompt, best first. `given` are the keywords of `LLM.beam_search`."""
    model, own = calls.model, {"max_tokens": search.max_tokens, "temperature": 0.0}
    wanted, how = settle("beam_search", None, DEFAULT_SAMPLING, own | dict(given), ("use_tqdm",))
    model.check_process()
    sampling = arguments.as_sampling(wanted)
    plain, beams = beam_search(model, sampling, search.beam_width, search.length_penalty, search.early_stopping)
    if any(how.get(name) for name in ("controller", "controllers", "constraint")):
        raise InvalidRequest("a controller or a constraint was given; beam search takes neither", "constraint")
    outputs = calls.run(make_collectors(model, prompts, plain, None, {**how, "controller": beams}), use_tqdm)
    for output in outputs:
        raise_first_error(output)
        output.outputs = found_beams(model.tokenizer, output, beams, sampling, search.beam_width)
        del output.storage[BEAMS]
    return outputs
