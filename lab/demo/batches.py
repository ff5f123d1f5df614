"""Token batches for training: generated documents, encoded and packed into rows.

A batch follows from the seed and its step number alone, so training can be resumed at any step without
replaying what came before. Every row begins with a whole document; what does not fit at its end begins the
next row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from lab.demo.corpus import Piece, document, long_document
from lab.demo.corpus.mix import STAGES, Mixture

NO_BOS_SHARE = 0.15
"""Share of rows that begin without `<|bos|>`, because some callers leave it out."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Rows and tokens per row of ordinary steps and of long ones; every `long_every`-th step is long.

    `stages` are the steps at which the later mixtures of the corpus begin.
    """

    rows: int = 20
    length: int = 320
    long_rows: int = 2
    long_length: int = 2048
    long_every: int = 16
    stages: tuple[int, ...] = (1250, 2000, 2500, 2750)


class Batch(NamedTuple):
    """Token ids, (rows, length) int64, and which of them the model must predict, (rows, length) bool."""

    tokens: torch.Tensor
    is_target: torch.Tensor


def make_batch(tokenizer: PreTrainedTokenizerFast, shape: BatchShape, seed: int, step: int) -> Batch:
    """The batch of one step."""
    rng = random.Random(f"batch:{seed}:{step}")
    is_long = step % shape.long_every == shape.long_every - 1
    rows, length = (shape.long_rows, shape.long_length) if is_long else (shape.rows, shape.length)
    tokens = torch.full((rows, length), tokenizer.pad_token_id, dtype=torch.int64)
    is_target = torch.zeros((rows, length), dtype=torch.bool)
    documents = _encoded_documents(tokenizer, rng, is_long, STAGES[sum(step >= begin for begin in shape.stages)])
    pending: list[tuple[list[int], list[bool]]] = []
    for row in range(rows):
        ids, mask = _fill(documents, pending, length)
        skip = 1 if rng.random() < NO_BOS_SHARE else 0
        ids, mask = ids[skip : skip + length], mask[skip : skip + length]
        tokens[row, : len(ids)] = torch.tensor(ids)
        is_target[row, : len(ids)] = torch.tensor(mask)
    is_target[:, 0] = False
    return Batch(tokens, is_target)


def encode(tokenizer: PreTrainedTokenizerFast, pieces: list[Piece]) -> tuple[list[int], list[bool]]:
    """Token ids of a document, and for each whether it is a target."""
    ids: list[int] = []
    mask: list[bool] = []
    for piece in pieces:
        encoded = tokenizer.backend_tokenizer.encode(piece.text, add_special_tokens=False).ids
        ids += encoded
        mask += [piece.is_target] * len(encoded)
    return ids, mask


def _encoded_documents(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, is_long: bool, mixture: Mixture
) -> Iterator[tuple[list[int], list[bool]]]:
    while True:
        make = long_document if is_long and rng.random() < 0.5 else document
        pieces = make(rng, mixture=mixture)
        yield encode(tokenizer, pieces)


def _fill(
    documents: Iterator[tuple[list[int], list[bool]]],
    pending: list[tuple[list[int], list[bool]]],
    length: int,
) -> tuple[list[int], list[bool]]:
    """One row: waiting documents first, then new ones until a few in a row do not fit."""
    ids: list[int] = []
    mask: list[bool] = []
    misses = 0
    while misses < 4:
        more_ids, more_mask = pending.pop(0) if pending and not ids else next(documents)
        if ids and len(ids) + len(more_ids) > length:
            misses += 1
            if len(pending) < 2:
                pending.append((more_ids, more_mask))
            continue
        ids += more_ids
        mask += more_mask
    return ids, mask
