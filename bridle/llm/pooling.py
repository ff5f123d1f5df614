"""Vectors, labels and scores of texts for `LLM`. This module makes the requests and reads the vectors in the outputs.
The caller runs the requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from bridle.errors import InvalidRequest
from bridle.llm import arguments
from bridle.llm.options import RunOptions
from bridle.llm.requests import serving_of
from bridle.outputs import RequestOutput
from bridle.serving import LoadedModel, OutputCollector, raise_first_error
from bridle.serving.requests import pooling_inputs

#: Keywords for the reading of texts.
READING = ("prompt_name", "truncate_prompt_tokens")

Run = Callable[[list[OutputCollector]], list[RequestOutput]]


@dataclass(frozen=True, slots=True)
class Classification:
    """The most probable label of a text, and the scores of all labels in the model's order."""

    label: str
    scores: dict[str, float]

    @property
    def score(self) -> float:
        """Return the score of the most probable label."""
        return self.scores[self.label]


def vectors(
    model: LoadedModel, prompts: Any, dimensions: int | None, how: RunOptions, given: Mapping[str, Any], run: Run
) -> list[list[float]]:
    """Return a vector for each text or list of token ids."""
    model.check_process()
    pooling_inputs.check_embeds(model, dimensions)
    found = _run(model, arguments.as_prompts(prompts), how, given, run)
    return [pooling_inputs.shaped(model, vector, dimensions, given.get("normalize", True)).tolist() for vector in found]


def labels(model: LoadedModel, texts: Any, how: RunOptions, given: Mapping[str, Any], run: Run) -> list[Classification]:
    """Return the labels of a classifier for each text or pair of texts."""
    model.check_process()
    pooling_inputs.check_classifies(model)
    assert model.pooling is not None  # it classifies
    names, activation = model.pooling.labels, pooling_inputs.activation_of(model)
    items = [texts] if isinstance(texts, str) else list(texts)
    for item in items:
        if not isinstance(item, str) and not (isinstance(item, tuple) and len(item) == 2):
            raise InvalidRequest(f"texts has {item!r}; each must be a text, or a tuple of two texts", "texts")
    rows = [pooling_inputs.activated(logits, activation) for logits in _run(model, items, how, given, run)]
    best = [max(range(len(row)), key=row.__getitem__) for row in rows]
    return [Classification(names[b], dict(zip(names, row, strict=True))) for b, row in zip(best, rows, strict=True)]


def scores(
    model: LoadedModel,
    texts: str | Sequence[str],
    others: str | Sequence[str],
    how: RunOptions,
    given: Mapping[str, Any],
    run: Run,
) -> list[float]:
    """Return the score of each pair of texts. If `texts` is a single text, it is paired with all `others`."""
    model.check_process()
    firsts = [texts] if isinstance(texts, str) else list(texts)
    seconds = [others] if isinstance(others, str) else list(others)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(f"{len(firsts)} texts do not fit {len(seconds)} others; give pairs, or one text", "others")
    pairs = list(zip(firsts, seconds, strict=True))
    if pooling_inputs.ranks_pairs(model):
        activation = pooling_inputs.activation_of(model)
        return [pooling_inputs.activated(logits, activation)[0] for logits in _run(model, pairs, how, given, run)]
    distinct = list(dict.fromkeys(text for pair in pairs for text in pair))
    known = dict(zip(distinct, _run(model, distinct, how, given, run), strict=True))
    unit = {text: pooling_inputs.shaped(model, vector) for text, vector in known.items()}
    return [sum(map(mul, unit[one], unit[other])) for one, other in pairs]


def _run(
    model: LoadedModel, items: Sequence[pooling_inputs.Item], how: RunOptions, given: Mapping[str, Any], run: Run
) -> list[array[float]]:
    """Return the vectors of the given texts as the model gives them."""
    reading = pooling_inputs.PoolingOptions(given.get("prompt_name"), given.get("truncate_prompt_tokens"))
    adapter: Any = how.get("adapter")
    options = serving_of(model, how).options(adapter)
    requests = [pooling_inputs.vector_request(model, item, reading, **options) for item in items]
    outputs = run([OutputCollector(request) for request in requests])
    for output in outputs:
        raise_first_error(output)
    return [array("f") if output.embedding is None else output.embedding for output in outputs]
