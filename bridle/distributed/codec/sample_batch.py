"""Encodes and decodes sample batches. A mask that several batch rows share is sent once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from bridle.distributed.codec.columns import check_lengths, item, shares
from bridle.distributed.codec.sampling_params import SamplingNames, SamplingSlots
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED, PaddedVocab
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, ScoreRun
from bridle.errors import ProtocolError


def encode_batch(batch: SampleBatch, names: SamplingNames) -> pb.Batch:
    """Encode the batch as columns, with the sampling parameters that `names` has not sent yet."""
    rows = batch.rows
    slots, new = names.name([row.sampling for row in rows])
    message = pb.Batch(
        step=batch.step,
        unnamed=batch.unnamed.bounds,
        samplings=new,
        seq_ids=[row.seq_id for row in rows],
        logits_indexes=[row.logits_index for row in rows],
        slots=slots,
        keys=[row.key for row in rows],
        draws=[row.draw for row in rows],
    )
    if any(row.mask is not None for row in rows):
        _add_masks(message, rows)
    if any(row.bias for row in rows):
        message.num_bias.extend([len(row.bias) for row in rows])
        message.bias_tokens.extend([token for row in rows for token, _ in row.bias])
        message.bias_values.extend([value for row in rows for _, value in row.bias])
    if any(row.mu is not None for row in rows):
        message.mus.extend([math.nan if row.mu is None else row.mu for row in rows])
    if any(row.num_ahead for row in rows):
        message.num_ahead.extend([row.num_ahead for row in rows])
    if any(row.num_traced for row in rows):
        message.num_traced.extend([row.num_traced for row in rows])
    if batch.scores:
        _add_scores(message, batch.scores)
    return message


def _add_masks(message: pb.Batch, rows: Sequence[SampleRow]) -> None:
    numbers: dict[bytes, int] = {}
    for row in rows:
        message.masks.append(0 if row.mask is None else numbers.setdefault(row.mask, len(numbers) + 1))
    message.mask_rows.extend(numbers)


def _add_scores(message: pb.Batch, scores: Sequence[ScoreRun]) -> None:
    message.score_seq_ids.extend([run.seq_id for run in scores])
    message.score_starts.extend([run.logits_start for run in scores])
    message.score_num_tokens.extend([len(run.tokens) for run in scores])
    message.score_num_top.extend([run.num_top for run in scores])
    message.score_tokens.extend(chain.from_iterable([run.tokens for run in scores]))


def decode_batch(message: pb.Batch, slots: SamplingSlots) -> SampleBatch:
    """Decode a sample batch. Raises `ProtocolError` if the message's columns have inconsistent lengths."""
    what = f"batch of step {message.step}"
    for sampling in message.samplings:
        slots.learn(sampling)
    num_rows = len(message.seq_ids)
    check_lengths(what, num_rows, message.logits_indexes, message.slots, message.keys, message.draws)
    rows = map(
        SampleRow,
        message.seq_ids,
        message.logits_indexes,
        [slots.get(slot) for slot in message.slots],
        message.keys,
        message.draws,
        _masks(message, num_rows, what),
        _biases(message, num_rows, what),
        _mus(message, num_rows, what),
        _counts(message.num_ahead, num_rows, what),
        _counts(message.num_traced, num_rows, what),
    )
    return SampleBatch(message.step, list(rows), _scores(message, what), read_unnamed(message.unnamed, what))


def read_unnamed(bounds: Sequence[int], what: str) -> PaddedVocab:
    """Decode the ranges of vocabulary padding. Raises `ProtocolError` if the bounds are invalid."""
    try:
        return PaddedVocab.from_bounds(bounds) if bounds else NONE_UNNAMED
    except ValueError as error:
        raise ProtocolError(f"{what}: {error}") from None


def _masks(message: pb.Batch, num_rows: int, what: str) -> Sequence[bytes | None]:
    if not message.masks:
        return [None] * num_rows
    check_lengths(what, num_rows, message.masks)
    masks = [None, *message.mask_rows]
    return [item(masks, number, what) for number in message.masks]


def _biases(message: pb.Batch, num_rows: int, what: str) -> Sequence[tuple[tuple[int, float], ...]]:
    if not message.num_bias:
        return [()] * num_rows
    check_lengths(what, num_rows, message.num_bias)
    check_lengths(what, len(message.bias_tokens), message.bias_values)
    return shares(zip(message.bias_tokens, message.bias_values, strict=True), message.num_bias, what)


def _mus(message: pb.Batch, num_rows: int, what: str) -> Sequence[float | None]:
    if not message.mus:
        return [None] * num_rows
    check_lengths(what, num_rows, message.mus)
    return [None if math.isnan(mu) else mu for mu in message.mus]


def _counts(column: Sequence[int], num_rows: int, what: str) -> Sequence[int]:
    if not column:
        return [0] * num_rows
    check_lengths(what, num_rows, column)
    return list(column)


def _scores(message: pb.Batch, what: str) -> list[ScoreRun]:
    num_runs = len(message.score_seq_ids)
    if not num_runs:
        return []
    check_lengths(what, num_runs, message.score_starts, message.score_num_tokens, message.score_num_top)
    tokens = shares(message.score_tokens, message.score_num_tokens, what)
    return list(map(ScoreRun, message.score_seq_ids, message.score_starts, tokens, message.score_num_top))
