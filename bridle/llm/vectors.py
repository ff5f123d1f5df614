"""Control vectors computed from pairs of prompts, by the model that will use these vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bridle.control_vectors.directions import LastRows, Method, make_directions
from bridle.control_vectors.store import ControlVectors
from bridle.errors import InvalidRequest, UnsupportedFeature

MAX_PAIRS = 4_096
#: A text, or the messages of a chat.
PairPrompt = str | Sequence[Mapping[str, Any]]
Pair = tuple[PairPrompt, PairPrompt]


def pairs_of(rows: Iterable[Any]) -> list[Pair]:
    """Read pairs of prompts from objects with the fields `positive` and `negative`. Raises `InvalidRequest` with the
    number of the invalid line."""
    found: list[Pair] = []
    for number, row in enumerate(rows, 1):
        sides: list[Any] = [row.get(side) if isinstance(row, Mapping) else None for side in ("positive", "negative")]
        if not all(isinstance(side, (str, list)) and side for side in sides):
            raise InvalidRequest(
                f"pairs: line {number} must be an object; its positive and negative are texts or messages", "pairs"
            )
        found.append((sides[0], sides[1]))
        if len(found) > MAX_PAIRS:
            raise InvalidRequest(f"pairs: got more than {MAX_PAIRS}. Leave some of the pairs out.", "pairs")
    return found


def record_directions(
    vectors: ControlVectors, run: Callable[[PairPrompt], object], pairs: Sequence[Pair], method: Method
) -> dict[int, Tensor]:
    """Return, for each layer, the direction from the second prompts of the pairs to the first ones. `run` computes one
    prompt; nothing else may run at the same time."""
    if not pairs:
        raise InvalidRequest("pairs: at least one pair of prompts is needed", "pairs")
    if not vectors.is_local:
        raise UnsupportedFeature("pairs: the model runs in other processes. Load it in this process.", "pairs")
    vectors.recorder = recorder = LastRows()
    states: tuple[list[Tensor], list[Tensor]] = [], []
    try:
        for pair in pairs:
            for side, prompt in zip(states, pair, strict=True):
                run(prompt)
                side.append(recorder.states())
    finally:
        vectors.recorder = None
    return make_directions(torch.stack(states[0]), torch.stack(states[1]), method)
