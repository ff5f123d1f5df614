"""Beam search on completions and chats: reads its fields, and refuses fields that cannot be combined with beam
search."""

from __future__ import annotations

from bridle.controllers.beams import BeamSearch
from bridle.errors import InvalidRequest
from bridle.http.openai.schemas import BeamFields
from bridle.sampling import SamplingParams
from bridle.serving.lifecycle.beam_search import beam_search
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests.steering import Steering


def searching(
    body: BeamFields, serving: RequestLifecycle, sampling: SamplingParams, steering: Steering, width: int
) -> tuple[SamplingParams, BeamSearch]:
    """Return the sampling parameters and the controller of a beam search."""
    if steering.controller is not None or steering.constraint is not None:
        raise InvalidRequest("use_beam_search cannot be combined with a controller or a constraint", "use_beam_search")
    if sampling.max_tokens is None:
        sampling = sampling.with_(max_tokens=serving.host.default_max_tokens)
    return beam_search(serving.model, sampling, width, body.length_penalty, body.early_stopping)
