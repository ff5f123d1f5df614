"""Encodes and decodes step results. Log-probabilities are sent only for batch rows that requested them, with full
precision."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from bridle.distributed.codec.columns import check_lengths, item, shares
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.scheduling.step_plan import SampleBatch, StepResult
from bridle.errors import ProtocolError
from bridle.outputs import Logprob
from bridle.traces import Draw, Odds


def encode_result(result: StepResult) -> pb.Result:
    """Encode the step result as columns."""
    message = pb.Result(step=result.step, tokens=result.tokens, mus=result.mus)
    told = [(number, logprob) for number, logprob in enumerate(result.logprobs) if logprob is not None]
    if told:
        message.logprob_rows.extend([number for number, _ in told])
        message.logprobs.CopyFrom(_encode_logprobs([logprob for _, logprob in told]))
    if result.scores:
        message.num_scores.extend([len(run) for run in result.scores])
        message.scores.CopyFrom(_encode_logprobs(list(chain.from_iterable(result.scores))))
    if result.draws:
        _add_draws(message, result)
    if result.probes:
        message.num_probes.extend([len(readings) for readings in result.probes])
        message.probes.extend(chain.from_iterable(result.probes))
    return message


def _add_draws(message: pb.Result, result: StepResult) -> None:
    traced = [(row, draw) for row, draw in enumerate(result.draws) if draw is not None]
    changed = [(row, draw, draw.after) for row, draw in traced if draw.after is not None]
    message.traced_rows.extend([row for row, _ in traced])
    message.before.CopyFrom(_encode_logprobs([_logprob(draw.before) for _, draw in traced]))
    message.changed_rows.extend([row for row, _, _ in changed])
    message.after.CopyFrom(_encode_logprobs([_logprob(after) for _, _, after in changed]))
    message.num_allowed.extend([draw.num_allowed or 0 for _, draw, _ in changed])
    message.taken.extend([draw.taken for _, draw, _ in changed])


def _logprob(odds: Odds) -> Logprob:
    return Logprob(0, odds.logprob, odds.top, odds.rank)


def _encode_logprobs(logprobs: Sequence[Logprob]) -> pb.Logprobs:
    return pb.Logprobs(
        tokens=[each.token for each in logprobs],
        logprobs=[each.logprob for each in logprobs],
        ranks=[each.rank or 0 for each in logprobs],
        num_top=[len(each.top) for each in logprobs],
        top_tokens=[token for each in logprobs for token, _ in each.top],
        top_logprobs=[value for each in logprobs for _, value in each.top],
    )


def decode_result(message: pb.Result) -> StepResult:
    """Decode a step result. Raises `ProtocolError` if the message's columns have inconsistent lengths."""
    what = f"result of step {message.step}"
    tokens = list(message.tokens)
    logprobs: list[Logprob | None] = [None] * len(tokens)
    if message.logprob_rows:
        told = _decode_logprobs(message.logprobs, what)
        check_lengths(what, len(told), message.logprob_rows)
        for row, logprob in zip(message.logprob_rows, told, strict=True):
            item(tokens, row, what)
            logprobs[row] = logprob
    scores: list[list[Logprob]] = []
    if message.num_scores:
        scores = [list(run) for run in shares(_decode_logprobs(message.scores, what), message.num_scores, what)]
    draws = _decode_draws(message, what)
    probes = shares(message.probes, message.num_probes, what)
    return StepResult(message.step, tokens, logprobs, scores, list(message.mus), draws, probes)


def _decode_draws(message: pb.Result, what: str) -> list[Draw | None]:
    if not message.traced_rows:
        return []
    before, after = _decode_odds(message.before, what), _decode_odds(message.after, what)
    check_lengths(what, len(message.traced_rows), before)
    check_lengths(what, len(message.changed_rows), after, message.num_allowed, message.taken)
    draws: list[Draw | None] = [None] * len(message.tokens)
    for row, odds in zip(message.traced_rows, before, strict=True):
        item(draws, row, what)
        draws[row] = Draw(odds)
    for row, *rest in zip(message.changed_rows, after, message.num_allowed, message.taken, strict=True):
        draw, (odds, num_allowed, taken) = item(draws, row, what), rest
        if draw is None:
            raise ProtocolError(f"{what}: batch row {row} has a token changed by its mask, but no trace")
        draws[row] = Draw(draw.before, odds, num_allowed or None, taken)
    return draws


def _decode_odds(message: pb.Logprobs, what: str) -> list[Odds]:
    return [Odds(each.logprob, each.rank, each.top) for each in _decode_logprobs(message, what)]


def check_result(result: StepResult, batch: SampleBatch, vocab_size: int) -> StepResult:
    """Return the result. Raises `ProtocolError` if the result does not match the batch, as the engine expects."""
    what, tokens = f"result of step {result.step}", result.tokens
    check_lengths(what, len(batch.rows), tokens)
    if tokens and not -1 <= min(tokens) <= max(tokens) < vocab_size:
        raise ProtocolError(
            f"{what}: got token ids from {min(tokens)} to {max(tokens)}; the vocabulary has {vocab_size} tokens"
        )
    for column in (result.mus, result.draws, result.probes):
        if column:
            check_lengths(what, len(batch.rows), column)
    check_lengths(what, len(batch.scores), result.scores)
    for run, scores in zip(batch.scores, result.scores, strict=True):
        check_lengths(what, len(run.tokens), scores)
    return result


def _decode_logprobs(message: pb.Logprobs, what: str) -> list[Logprob]:
    check_lengths(what, len(message.tokens), message.logprobs, message.ranks, message.num_top)
    check_lengths(what, len(message.top_tokens), message.top_logprobs)
    tops = shares(zip(message.top_tokens, message.top_logprobs, strict=True), message.num_top, what)
    ranks = [rank or None for rank in message.ranks]
    return list(map(Logprob, message.tokens, message.logprobs, tops, ranks))
