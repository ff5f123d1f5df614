"""Beam search on the routes that have it: what a body asks for, and what does not go with it."""

from __future__ import annotations

from bridle.controllers.beams import BeamSearch
from bridle.errors import InvalidRequest
from bridle.http.openai.schemas import BeamFields
from bridle.sampling import SamplingParams
from bridle.service.beams import beam_search
from bridle.service.loading import LoadedModel
from bridle.service.steering import Steering


def check_beams(body: BeamFields) -> None:
    """Refuse beam search in streams, and what belongs to it without it."""
    if body.use_beam_search and body.stream:
        raise InvalidRequest("use_beam_search is true: the best texts are not known while streaming", "use_beam_search")
    if not body.use_beam_search:
        for name, value in (("length_penalty", body.length_penalty), ("early_stopping", body.early_stopping)):
            if value not in (None, False, 1.0):
                raise InvalidRequest(f"{name} is {value!r}; it needs use_beam_search", name)


def width_of(body: BeamFields, num_wanted: int) -> int:
    """How many choices are looked at, to answer with `num_wanted`."""
    width = body.best_of or num_wanted
    if width < num_wanted:
        raise InvalidRequest(f"best_of is {width}, less than n ({num_wanted})", "best_of")
    return width


def searching(
    body: BeamFields, model: LoadedModel, sampling: SamplingParams, steering: Steering, width: int
) -> tuple[SamplingParams, Steering, BeamSearch | None]:
    """What to ask the engine for, and the search, if there is to be one."""
    if not body.use_beam_search:
        return sampling, steering, None
    if steering.controller is not None or steering.constraint is not None:
        raise InvalidRequest("use_beam_search goes with no controller and no constraint", "use_beam_search")
    plain, search = beam_search(model, sampling, width, body.length_penalty, body.early_stopping)
    return plain, Steering(search), search
