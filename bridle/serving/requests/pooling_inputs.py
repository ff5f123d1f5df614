"""Inputs of embedding models (texts and pairs of texts), and the vectors that clients get.

The model's folder has rules for its inputs: prompts before a text, a maximum length, and token types for the texts
of a pair. A decoder model reads a text like a prompt. This module uses no wire format.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.engine.request import Request
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.serving.requests.prompts import MAX_INLINE_CHARS, encode_prompt, grouped
from bridle.serving.requests.request_builder import (
    EMBEDDING,
    OwnOptions,
    check_length,
    check_num_tokens,
    check_unicode,
    make_request,
)

if TYPE_CHECKING:
    from typing import Unpack

    from bridle.engine.interfaces import Task
    from bridle.model.pooling.settings import Activation
    from bridle.serving.lifecycle.generation import SubRequest
    from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
    from bridle.serving.models.loading import LoadedModel

_log = logging.getLogger(__name__)
_NO_HEAD = "%s has no pooling head: an embedding is the last token's hidden state. For search, serve an embedding model"
#: A text or its tokens, or a pair of texts.
Item = str | Sequence[int] | tuple[str, str]
#: As `truncate`: truncate a text to the model's limit.
AS_FITS = -1


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """Options for reading texts. `prompt` names the prompt of the model that is added before a text. `truncate` is the
    maximum number of tokens to keep (None: no truncation; `AS_FITS`: the model's limit)."""

    prompt: str | None = None
    truncate: int | None = None


PLAINLY = PoolingOptions()


# -- tasks of models -----------------------------------------------------------------------------------------


def _check_kind(model: LoadedModel, wanted: Task, instead: str) -> None:
    """Raise `UnsupportedFeature` if the model has another task than `wanted`. `instead` names the alternative for the
    error message."""
    task = model.info.task
    if wanted == "embed" and task != "classify":
        return
    if task != wanted:
        what = {"generate": "generates text", "embed": "computes embeddings", "classify": "classifies texts"}
        raise UnsupportedFeature(f"{model.name!r} {what[task]}; {instead}", "model")


def check_embeds(model: LoadedModel, dimensions: int | None) -> None:
    """Raise `UnsupportedFeature` for a model without vectors, or for a number of dimensions that its vectors cannot
    have. Log a warning, once, for a model that generates text."""
    _check_kind(model, "embed", "ask /v1/classify, or /v1/score and /v1/rerank if there is one label")
    if model.pooling is None and not model.has_embedded:
        _log.warning(_NO_HEAD, model.name)
    model.has_embedded = True
    size = model.info.embedding_size
    if dimensions is None or not size:
        return
    if not 1 <= dimensions <= size:
        raise UnsupportedFeature(
            f"dimensions is {dimensions}; must be from 1 to {size}, the dimensions of this model's embeddings",
            "dimensions",
        )
    known = () if model.pooling is None else model.pooling.dimensions
    if known and dimensions not in (*known, size):
        shown = ", ".join(map(str, known[:20]))
        raise UnsupportedFeature(
            f"dimensions is {dimensions}; this model's embeddings can be shortened only to {shown}", "dimensions"
        )


def check_classifies(model: LoadedModel) -> None:
    """Raise `UnsupportedFeature` for a model that gives no labels."""
    _check_kind(model, "classify", "a `choice` constraint lets a model that generates classify")


def ranks_pairs(model: LoadedModel) -> bool:
    """Return whether the model itself scores a pair of texts. If the model does not score pairs, the score is the
    cosine of the two vectors. Raises `UnsupportedFeature` for a classifier with several labels, because several labels
    are not one score."""
    if model.info.task != "classify":
        return False
    if model.info.embedding_size != 1:
        raise UnsupportedFeature(
            f"{model.name!r} has {model.info.embedding_size} labels; scores need a model with one label. Use "
            "/v1/classify",
            "model",
        )
    return True


# -- reading -------------------------------------------------------------------------------------------------


async def read_texts(
    serving: RequestLifecycle, items: Sequence[Item], how: PoolingOptions = PLAINLY
) -> list[tuple[int, ...]]:
    """Return the checked tokens of the texts of a call. Long texts are tokenized in a thread."""
    model = serving.model
    async with serving.story.terms.bounded("its texts were tokenized"):
        if sum(map(_num_chars, items)) <= MAX_INLINE_CHARS:
            return read_all(model, items, how)
        found: list[tuple[int, ...]] = []
        for group in grouped(items, _num_chars):
            found += await model.in_text_thread(read_all, model, group, how)
        return found


def read_all(model: LoadedModel, items: Sequence[Item], how: PoolingOptions = PLAINLY) -> list[tuple[int, ...]]:
    """Return the checked tokens of texts, in this thread."""
    return [read_item(model, item, how) for item in items]


def _num_chars(item: Item) -> int:
    return sum(map(len, item)) if isinstance(item, tuple) and item and isinstance(item[0], str) else len(item)


def read_item(model: LoadedModel, item: Item, how: PoolingOptions = PLAINLY) -> tuple[int, ...]:
    """Return the checked tokens of a text or of a pair of texts."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return _read_pair(model, str(item[0]), str(item[1]), how)
    if isinstance(item, str) and model.pooling is not None:
        return _read_text(model, item, how)
    _check_prompt(model, how.prompt)
    if model.pooling is None:
        return encode_prompt(model, item, truncate=_cut(model, how))
    return encode_prompt(model, item[: _cut(model, how)])


def _read_text(model: LoadedModel, text: str, how: PoolingOptions) -> tuple[int, ...]:
    pooling = model.pooling
    assert pooling is not None
    name = how.prompt or pooling.default_prompt
    _check_prompt(model, name)
    text = (pooling.prompts[name] if name is not None else "") + text
    text = _readable(model, text, how)
    tokens = tuple(model.tokenizer.encode_cut(text.lower() if pooling.lowered else text, _cut(model, how)))
    return _checked(model, tokens)


def _read_pair(model: LoadedModel, first: str, second: str, how: PoolingOptions) -> tuple[int, ...]:
    pooling = model.pooling
    assert pooling is not None
    vocabulary = model.info.vocab_size // pooling.num_types
    texts = [_readable(model, text.lower() if pooling.lowered else text, how) for text in (first, second)]
    pairs = model.tokenizer.encode_pair(texts[0], texts[1], _cut(model, how))
    tokens = tuple(token + vocabulary * min(kind, pooling.num_types - 1) for token, kind in pairs)
    return _checked(model, tokens)


def _check_prompt(model: LoadedModel, name: str | None) -> None:
    known = {} if model.pooling is None else model.pooling.prompts
    if name is not None and name not in known:
        there = ", ".join(sorted(known)[:20]) or "none"
        raise InvalidRequest(
            f"{model.name!r} has no prompt named {name[:100]!r}; its prompts are: {there}", "prompt_name"
        )


def _readable(model: LoadedModel, text: str, how: PoolingOptions) -> str:
    """Return the part of a text that must be tokenized: the whole text, or the beginning that contains its first
    tokens."""
    if how.truncate is None:
        check_length(model, len(text), "input")
    check_unicode(text, "input")
    return text if how.truncate is None else text[: model.max_prompt_chars]


def _cut(model: LoadedModel, how: PoolingOptions) -> int | None:
    """Return the number of tokens to which a text is truncated; None if it is not truncated."""
    return None if how.truncate is None else _limit(model, how)


def _limit(model: LoadedModel, how: PoolingOptions) -> int:
    limit = model.max_sequence_tokens
    if how.truncate is None or how.truncate == AS_FITS:
        return limit
    if not 1 <= how.truncate <= limit:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {how.truncate}; must be 1 to {limit}, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )
    return how.truncate


def _checked(model: LoadedModel, tokens: tuple[int, ...]) -> tuple[int, ...]:
    if not tokens:
        raise InvalidRequest("the text is empty; it must have at least one token", "input")
    check_num_tokens(model, len(tokens))
    return tokens


def vector_request(
    model: LoadedModel, item: Item, how: PoolingOptions = PLAINLY, **options: Unpack[OwnOptions]
) -> Request:
    """Return a request for the vector of a text. Raises the same errors as `build_request`."""
    tokens = read_item(model, item, how)
    return make_request(model, tokens, EMBEDDING, detokenize=False, embeds=True, **options)


# -- computing vectors ---------------------------------------------------------------------------------------


async def run_vectors(
    serving: RequestLifecycle,
    tokens: Sequence[tuple[int, ...]],
    at_once: int,
    each: Callable[[int, array[float]], None],
) -> str:
    """Compute the vectors of texts, at most `at_once` at the same time. `each` is called with the index of a text and
    its vector. Returns the name under which the model is served."""
    generation = await serving.prepare(tokens, EMBEDDING, detokenize=False, embeds=True, at_once=at_once)
    told: set[int] = set()

    async def sink(part: SubRequest, events: object) -> None:
        vector = part.collector.output.embedding
        if vector is not None and part.number not in told:
            told.add(part.number)
            each(part.number, vector)

    await generation.run(sink)
    return generation.served_name


# -- shaping vectors and scores ------------------------------------------------------------------------------


def shaped(
    model: LoadedModel, vector: array[float], dimensions: int | None = None, normalize: bool = True
) -> array[float]:
    """Return the first `dimensions` values of a vector. With `normalize`, the returned vector is scaled to length 1."""
    part = vector if dimensions is None else vector[:dimensions]
    is_unit = model.pooling is None or model.pooling.is_unit
    if not normalize or (is_unit and len(part) == len(vector)):
        return part
    length = math.hypot(*part)
    return array("f", [value / length for value in part]) if length else part


def activation_of(model: LoadedModel) -> Activation:
    """Return the activation that turns the model's logits into scores."""
    return "identity" if model.pooling is None else model.pooling.activation


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    """Return the scores for the logits of a classifier."""
    if activation == "identity":
        return list(logits)
    if activation == "sigmoid":
        return [_sigmoid(value) for value in logits]
    most = max(logits)
    weights = [math.exp(value - most) for value in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    small = math.exp(value)
    return small / (1.0 + small)
