"""One sequence's row of a plan: what the executor's mirror of it does not know yet, and which logits are wanted."""

from __future__ import annotations

from bridle.engine.plan import PlanRow
from bridle.engine.sequence import Sequence


def plan_row(seq: Sequence, num_tokens: int) -> PlanRow:
    """The row that computes the next `num_tokens` of `seq`, whose mirror is up to date from then on."""
    row = PlanRow(
        seq_id=seq.id,
        start=seq.num_computed,
        num_scheduled=num_tokens,
        num_logits=_num_logits(seq, num_tokens),
        num_kept=seq.num_mirrored_tokens,
        new_tokens=tuple(seq.tokens[seq.num_mirrored_tokens :]),
        num_kept_blocks=seq.num_mirrored_blocks,
        new_blocks=tuple(seq.block_table[seq.num_mirrored_blocks :]),
        num_prompt=seq.num_prompt,
        adapter=seq.request.adapter,
    )
    seq.num_mirrored_tokens = len(seq.tokens)
    seq.num_mirrored_blocks = len(seq.block_table)
    return row


def _num_logits(seq: Sequence, num_tokens: int) -> int:
    """How many of the last scheduled positions must give logits: those that predict a token to be scored, and
    the last one if the next token is drawn from it."""
    start, end = seq.num_computed, seq.num_computed + num_tokens
    draws = end == len(seq.tokens)
    if not seq.wants_scores:
        return int(draws)
    first = max(seq.num_scored, start + 1) - 1  # predicts the first token to score
    if first < min(end, seq.num_to_score - 1):
        return end - first
    return int(draws)
