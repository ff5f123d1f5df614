"""Checks at load time that a tokenizer and a model have the same vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.errors import UnsupportedModel
from bridle.safe_repr import short_repr

if TYPE_CHECKING:
    from bridle.engine.interfaces import ExecutorInfo
    from bridle.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_NUM_SHOWN = 3


def check_sizes(tokenizer: Tokenizer, num_ids: int, model: str) -> None:
    """Compare a tokenizer with a model whose vocabulary has `num_ids` ids. Raises `UnsupportedModel` if an ordinary
    token has an id that the model does not have. A model without this id was not trained with the given tokenizer.
    Tokens that were added later, and ids without a token, are only logged."""
    ordinary, added = tokenizer.beyond(num_ids)
    if ordinary:
        raise UnsupportedModel(
            f"the tokenizer has {tokenizer.vocab_size} token ids, but the model {model!r} has {num_ids}. The model "
            f"lacks {len(ordinary)} ordinary tokens, such as {_some(ordinary)}; use the model's own tokenizer"
        )
    if added:
        _log.warning(
            "the tokenizer has %d token ids, but the model has %d. The model never writes the %d added tokens that "
            "it lacks (%s), and prompts with them are refused",
            *(tokenizer.vocab_size, num_ids, len(added), _some(added)),
        )
    num_further = max(num_ids - tokenizer.vocab_size, 0)
    if num_further:
        _log.info(
            "the model has %d token ids, but the tokenizer has %d. The %d further ids have no text, and are sampled "
            "only with unnamed_ids",
            *(num_ids, tokenizer.vocab_size, num_further),
        )
    gaps = tokenizer.without_token(num_ids - num_further)
    if gaps:
        _log.info(
            "the tokenizer skips %d ids (%s). These ids have no text, and are sampled only with unnamed_ids",
            *(len(gaps), _some(gaps)),
        )


def find_unnamed(tokenizer: Tokenizer, info: ExecutorInfo) -> PaddedVocab:
    """Return the ids of the model that have no token. An id that ends texts counts as having a token."""
    if info.task != "generate":
        return NONE_UNNAMED
    return PaddedVocab.of(set(tokenizer.without_token(info.vocab_size)) - set(info.eos_token_ids))


def _some(pieces: Sequence[str] | Sequence[int]) -> str:
    return ", ".join(short_repr(piece) for piece in pieces[:_NUM_SHOWN])
