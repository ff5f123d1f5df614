"""The executor's copies of all sequences. Only step plans change the copies. A plan is checked completely before it is
applied, so a refused plan changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.errors import InternalError
from bridle.model.sequence_state import CachedRequestState

_Sizes = tuple[int, int]  # tokens, blocks


class InputBatch:
    """The executor's copies of sequences, by sequence id. The KV pool has `num_blocks` blocks, and the model `num_ids`
    token ids."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, num_ids: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_ids = num_ids
        self.num_names = 0  # number of tokens being sampled; the last new token of a row may be a placeholder for one
        self._mirrors: dict[int, CachedRequestState] = {}

    def __len__(self) -> int:
        return len(self._mirrors)

    def __getitem__(self, seq_id: int) -> CachedRequestState:
        try:
            return self._mirrors[seq_id]
        except KeyError:
            raise InternalError(f"the executor has no state of sequence {seq_id}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._mirrors)

    def clear(self) -> None:
        self._mirrors.clear()
        self.num_names = 0

    def apply(self, plan: StepPlan) -> list[CachedRequestState]:
        """Check `plan`, then apply it to the copies of sequences. Return the copy of each row's sequence, in order.
        Raises `InternalError`, which names the inconsistency.
        """
        self._check(plan)
        for fork in plan.forks:
            parent = self._mirrors[fork.parent]
            self._mirrors[fork.child] = parent.copy(fork.num_tokens, fork.num_blocks)
        for seq_id in plan.freed:
            self._mirrors.pop(seq_id, None)
        return [self._update(row) for row in plan.rows]

    def _update(self, row: PlanRow) -> CachedRequestState:
        mirror = self._mirrors.get(row.seq_id)
        if mirror is None:
            mirror = self._mirrors[row.seq_id] = CachedRequestState()
        if row.num_kept != len(mirror.tokens):
            mirror.keep_tokens(row.num_kept)
        if row.new_tokens:
            mirror.tokens.extend(row.new_tokens)
        if row.runs:
            mirror.media += row.runs
        if row.num_kept_blocks != len(mirror.blocks):
            mirror.keep_blocks(row.num_kept_blocks)
        if row.new_blocks:
            mirror.add_blocks(row.new_blocks)
        mirror.num_prompt = row.num_prompt
        return mirror

    # -- checking ------------------------------------------------------------------------------------------

    def _check(self, plan: StepPlan) -> None:
        forked: dict[int, _Sizes] = {}
        for fork in plan.forks:
            have = forked.get(fork.parent) or self._sizes(fork.parent)
            if have is None:
                raise _bad(plan, f"fork {fork.child} has parent {fork.parent}, which the executor does not know")
            if fork.child in forked or fork.child in self._mirrors:
                raise _bad(plan, f"fork {fork.child} has the id of a known sequence")
            if fork.num_tokens > have[0] or fork.num_blocks > have[1]:
                wanted = (fork.num_tokens, fork.num_blocks)
                raise _bad(plan, f"fork {fork.child} copies {wanted} (tokens, blocks), but its parent has {have}")
            forked[fork.child] = (fork.num_tokens, fork.num_blocks)
        for copy in plan.copies:
            if not (0 <= copy.source < self.num_blocks and 0 <= copy.target < self.num_blocks):
                raise _bad(plan, f"block copy {copy.source} -> {copy.target} is outside of {self.num_blocks} blocks")
        freed = set(plan.freed)
        seen: set[int] = set()
        for row in plan.rows:
            if row.seq_id in seen:
                raise _bad(plan, f"sequence {row.seq_id} has two rows")
            seen.add(row.seq_id)
            sizes = None if row.seq_id in freed else forked.get(row.seq_id) or self._sizes(row.seq_id)
            self._check_row(plan, row, sizes or (0, 0))

    def _sizes(self, seq_id: int) -> _Sizes | None:
        mirror = self._mirrors.get(seq_id)
        return None if mirror is None else (len(mirror.tokens), len(mirror.blocks))

    def _check_row(self, plan: StepPlan, row: PlanRow, sizes: _Sizes) -> None:
        tokens, blocks = sizes
        end = row.start + row.num_scheduled
        if not (0 <= row.num_kept <= tokens and 0 <= row.num_kept_blocks <= blocks):
            kept = (row.num_kept, row.num_kept_blocks)
            raise _bad(plan, f"sequence {row.seq_id} keeps {kept} (tokens, blocks), but has {sizes}")
        if row.start < 0 or row.num_scheduled < 1 or not 0 <= row.num_logits <= row.num_scheduled:
            raise _bad(
                plan,
                f"sequence {row.seq_id} schedules {row.num_scheduled} tokens from {row.start}, {row.num_logits} logits",
            )
        num_tokens = row.num_kept + len(row.new_tokens)
        if end > num_tokens or end > self.max_model_len:
            limit = f"{num_tokens} tokens, max_model_len {self.max_model_len}"
            raise _bad(plan, f"sequence {row.seq_id} is scheduled up to position {end}, but has {limit}")
        room = (row.num_kept_blocks + len(row.new_blocks)) * self.block_size
        if end > room:
            raise _bad(plan, f"sequence {row.seq_id} has blocks for {room} tokens, but needs {end}")
        for block in row.new_blocks:
            if not 0 <= block < self.num_blocks:
                raise _bad(plan, f"sequence {row.seq_id} gets block {block}; the pool has {self.num_blocks} blocks")
        has_name = self.num_names > 0 and row.new_tokens[-1:] and -self.num_names <= row.new_tokens[-1] < 0
        for token in row.new_tokens[:-1] if has_name else row.new_tokens:
            if not 0 <= token < self.num_ids:
                raise _bad(plan, f"sequence {row.seq_id} gets token id {token}; the model has {self.num_ids} ids")


def _bad(plan: StepPlan, what: str) -> InternalError:
    return InternalError(f"the plan of step {plan.step} is inconsistent: {what}")
