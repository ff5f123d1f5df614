"""Exact scores of options, which tests compare to the engine's choices. Each option is scored alone, as a prompt."""

from __future__ import annotations

import math

from bridle.outputs import PromptEvent
from tests.structured_output.kit import Lab


def exact(lab: Lab, texts: tuple[str, ...], prompt: tuple[int, ...]) -> list[float]:
    """Return each text's log-probability after the prompt, without the probability of longer options that begin with
    it."""
    paths = [tuple(lab.vocab.encode(text.encode())) for text in texts]
    scores = [_alone(lab, prompt, path) for path in paths]
    left = []
    for path, score in zip(paths, scores, strict=True):
        below = [s for p, s in zip(paths, scores, strict=True) if p != path and p[: len(path)] == path]
        left.append(math.log(math.exp(score) - sum(map(math.exp, below))))
    return left


def _alone(lab: Lab, prompt: tuple[int, ...], path: tuple[int, ...]) -> float:
    request = lab.request(None, (*prompt, *path), max_tokens=0, prompt_logprobs=0)
    lab.engine.add(request)
    (event,) = [event for event in lab.events() if isinstance(event, PromptEvent)]
    return sum(each.logprob for each in event.logprobs[len(prompt) :] if each is not None)
