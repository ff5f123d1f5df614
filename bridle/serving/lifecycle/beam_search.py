"""Beam search for front ends: the request to the engine, and the texts that the search found.

The outputs of the engine are the last beams. The controller reports the finished texts in a variable, and these texts
replace the beams.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bridle.controllers.beams import BEAMS, BeamSearch, EarlyStopping
from bridle.errors import InternalError, InvalidRequest
from bridle.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, Usage
from bridle.sampling import DEFAULT_SAMPLING, SamplingParams

if TYPE_CHECKING:
    from bridle.serving.models.loading import LoadedModel
    from bridle.tokenizer import Tokenizer

#: Sampling parameters that may be combined with beam search. Other parameters affect only sampled tokens, and beam
#: search samples none.
_KEPT = frozenset({"max_tokens", "seed", "ignore_eos", "logit_bias", "bias_texts", "allowed_token_ids", "n"})
_KEPT_OUTPUT = frozenset({"skip_special_tokens", "logprobs", "speculate", "prediction", "temperature"})


def beam_search(
    model: LoadedModel,
    sampling: SamplingParams,
    width: int,
    length_penalty: float | None = None,
    early_stopping: EarlyStopping | None = None,
) -> tuple[SamplingParams, BeamSearch]:
    """Return the sampling parameters and the controller of a request that runs a beam search. Raises `InvalidRequest`
    for options that beam search does not support together."""
    for name in type(sampling).__slots__:
        is_usual = getattr(sampling, name) == getattr(DEFAULT_SAMPLING, name)
        if not is_usual and name not in _KEPT | _KEPT_OUTPUT:
            raise InvalidRequest(
                f"{name} cannot be combined with beam search, which does not sample; leave it out", name
            )
    if sampling.temperature not in (0.0, 1.0):
        raise InvalidRequest(
            f"temperature is {sampling.temperature}; with beam search, which does not sample, it must be 0 or left out",
            "temperature",
        )
    if sampling.logprobs:
        raise InvalidRequest(f"logprobs is {sampling.logprobs}; with beam search it must be 0", "logprobs")
    if sampling.max_tokens is None:
        raise InvalidRequest("max_tokens is missing; beam search needs it", "max_tokens")
    most = min(model.engine.max_forks, model.batching.max_batch_size)
    if width > most:
        raise InvalidRequest(
            f"best_of is {width}, the beam width; this engine runs at most {most} beams at the same time", "best_of"
        )
    search = BeamSearch(
        width,
        sampling.max_tokens,
        () if sampling.ignore_eos else tuple(model.info.eos_token_ids),
        1.0 if length_penalty is None else length_penalty,
        False if early_stopping is None else early_stopping,
    )
    return sampling.with_(n=1, temperature=0.0, logprobs=None, ignore_eos=True, speculate=0, prediction=""), search


def found_beams(
    tokenizer: Tokenizer, output: RequestOutput, search: BeamSearch, sampling: SamplingParams, num_wanted: int
) -> list[CompletionOutput]:
    """Return the best texts of a beam search that has ended. `sampling` has the sampling parameters of the client."""
    if BEAMS not in output.storage:
        raise InternalError("a beam search ended without a result; expected at least one beam")
    made = []
    for index, (score, tokens, logprobs) in enumerate(json.loads(output.storage[BEAMS])[:num_wanted]):
        has_ended = tokens[-1] in search.ends
        shown = tokens[:-1] if has_ended and sampling.skip_special_tokens else tokens
        entries = [Logprob(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
        made.append(
            CompletionOutput(
                index,
                tokenizer.decode(shown, skip_special_tokens=sampling.skip_special_tokens),
                list(tokens),
                None if sampling.logprobs is None else list(entries),
                FinishReason.STOP if has_ended else FinishReason.LENGTH,
                tokens[-1] if has_ended else None,
                output.usage if index == 0 else Usage(),  # the cost of the whole search
                score=score,
            )
        )
    return made
