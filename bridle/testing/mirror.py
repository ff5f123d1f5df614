"""The executor's copy of each sequence, and a check of every rule that a plan must follow.

A `Mirror` is an executor's copy of one sequence: tokens and block table. `Mirrors` applies the forks, freed sequences
and rows of a plan to the executor's copies. `Mirrors` raises `InternalError` at the first operation that a correct
engine would not send. This module does not check the contents of the KV cache; the executor compares them afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.multimodal.multimodal_inputs import Runs, before
from bridle.engine.scheduling.step_plan import BlockCopy, ForkRow, PlanRow, StepPlan
from bridle.errors import InternalError
from bridle.testing.logits import ScriptedModel


def require(claim: bool, message: str) -> None:
    """Raise `InternalError` with `message` if `claim` is false."""
    if not claim:
        raise InternalError(message)


@dataclass(slots=True)
class Mirror:
    """One sequence in the executor. `digests` are the digests that the correct KV has for `tokens`."""

    seq_id: int
    adapter: str | None
    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_prompt: int = 0
    runs: Runs = ()

    def cut(self, num_tokens: int, num_blocks: int) -> None:
        """Keep only the first tokens and blocks of the executor's copy of a sequence."""
        require(
            num_tokens <= len(self.tokens), f"sequence {self.seq_id} keeps {num_tokens} tokens of {len(self.tokens)}"
        )
        require(
            num_blocks <= len(self.blocks), f"sequence {self.seq_id} keeps {num_blocks} blocks of {len(self.blocks)}"
        )
        self.runs = before(self.runs, num_tokens)
        del self.tokens[num_tokens:], self.digests[num_tokens:], self.blocks[num_blocks:]


class Mirrors:
    """An executor's copies (mirrors) of all sequences."""

    def __init__(self, info: ExecutorInfo, model: ScriptedModel) -> None:
        self.info = info
        self.model = model
        self._mirrors: dict[int, Mirror] = {}

    def __getitem__(self, seq_id: int) -> Mirror:
        require(seq_id in self._mirrors, f"sequence {seq_id} is unknown")
        return self._mirrors[seq_id]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._mirrors

    def __len__(self) -> int:
        return len(self._mirrors)

    def clear(self) -> None:
        """Forget all sequences."""
        self._mirrors.clear()

    def fork(self, row: ForkRow) -> None:
        """Create the executor's copy of the child of a fork."""
        parent = self[row.parent]
        require(row.child not in self, f"fork of {row.parent} makes sequence {row.child}, which exists")
        child = Mirror(
            row.child,
            parent.adapter,
            list(parent.tokens),
            list(parent.digests),
            list(parent.blocks),
            parent.num_prompt,
            parent.runs,
        )
        child.cut(row.num_tokens, row.num_blocks)
        child.num_prompt = min(child.num_prompt, row.num_tokens)
        self._mirrors[row.child] = child

    def adopt(self, seq_id: int, adapter: str | None, tokens: Sequence[int]) -> Mirror:
        """Create the executor's copy of a sequence whose first tokens already have KV."""
        require(seq_id not in self, f"sequence {seq_id} is adopted, and exists")
        digests = list(self.model.extend(self.model.root(adapter), tokens))
        made = self._mirrors[seq_id] = Mirror(seq_id, adapter, list(tokens), digests)
        return made

    def free(self, seq_id: int) -> None:
        """Forget one sequence. An unknown sequence id is not an error, because a sequence may end before its first
        row."""
        self._mirrors.pop(seq_id, None)

    def apply(self, row: PlanRow) -> Mirror:
        """Update the copy of a sequence with its row, and check that the row fits the copy."""
        known = row.seq_id in self
        if not known:
            self._mirrors[row.seq_id] = Mirror(row.seq_id, row.adapter)
        mirror = self[row.seq_id]
        require(
            mirror.adapter == row.adapter,
            f"sequence {row.seq_id} changes its adapter from {mirror.adapter} to {row.adapter}",
        )
        mirror.cut(row.num_kept, row.num_kept_blocks)
        self._extend(mirror, row)
        self._check_row(mirror, row)
        return mirror

    def _extend(self, mirror: Mirror, row: PlanRow) -> None:
        for token in row.new_tokens:
            require(
                0 <= token < self.info.vocab_size, f"sequence {row.seq_id} has token {token}, not in the vocabulary"
            )
        last = mirror.digests[-1] if mirror.digests else self.model.root(mirror.adapter)
        mirror.digests += self.model.extend(last, self._seen(row))
        mirror.runs += row.runs
        mirror.tokens += row.new_tokens
        mirror.blocks += row.new_blocks
        mirror.num_prompt = row.num_prompt

    def _seen(self, row: PlanRow) -> Sequence[int]:
        """Return the new tokens of a row. At image positions, a token is replaced by a number for the image's row."""
        seen = list(row.new_tokens)
        for run in row.runs:
            first = run.position - row.num_kept
            require(
                first >= 0 and first + run.length <= len(seen),
                f"sequence {row.seq_id} has a picture at {run.position}, which is not among its new tokens",
            )
            place = int.from_bytes(run.key[:6], "little")
            seen[first : first + run.length] = [
                self.info.vocab_size + place + run.offset + i for i in range(run.length)
            ]
        return seen

    def _check_row(self, mirror: Mirror, row: PlanRow) -> None:
        name, end = f"sequence {row.seq_id}", row.start + row.num_scheduled
        require(row.num_scheduled >= 1, f"{name} schedules {row.num_scheduled} tokens")
        require(row.start >= 0, f"{name} starts at {row.start}")
        require(end <= len(mirror.tokens), f"{name} computes up to {end} of {len(mirror.tokens)} tokens")
        require(end <= self.info.max_model_len, f"{name} computes {end} tokens; limit {self.info.max_model_len}")
        require(
            0 <= row.num_logits <= row.num_scheduled,
            f"{name} wants {row.num_logits} logits rows of {row.num_scheduled} positions",
        )
        require(0 <= row.num_prompt <= len(mirror.tokens), f"{name} has {row.num_prompt} prompt tokens")
        self._check_table(mirror, name, end)

    def _check_table(self, mirror: Mirror, name: str, end: int) -> None:
        if self.info.kv == "sequences":
            return
        size, blocks = self.info.block_size, mirror.blocks
        least, most = -(-end // size), -(-len(mirror.tokens) // size)
        require(
            least <= len(blocks) <= most, f"{name} has {len(blocks)} blocks for {end} of {len(mirror.tokens)} tokens"
        )
        require(len(set(blocks)) == len(blocks), f"{name} maps a block twice: {blocks}")
        for block in blocks:
            require(0 <= block < self.info.num_blocks, f"{name} maps block {block} of {self.info.num_blocks}")


def check_plan(plan: StepPlan, last_step: int, info: ExecutorInfo) -> None:
    """Check those rules for a plan that do not depend on the executor's copies of sequences."""
    require(plan.step > last_step, f"step {plan.step} follows step {last_step}")
    ids = [row.seq_id for row in plan.rows]
    require(len(set(ids)) == len(ids), f"a sequence has two rows in one plan: {ids}")
    if info.kv == "paged":
        check_copies(plan.copies, info.num_blocks)
    check_states(plan, info.num_states)


def check_states(plan: StepPlan, num_states: int) -> None:
    """Check that each row has a separate slot if there are slots, that each copy has a separate target, and that all
    slots exist."""
    targets = [copy.target for copy in plan.state_copies]
    require(len(set(targets)) == len(targets), f"a state slot is the target of two copies: {plan.state_copies}")
    written = [save.slot for row in plan.rows for save in row.saves]
    written += [row.state for row in plan.rows if num_states or row.state != -1]
    require(len(set(written)) == len(written), f"a state slot is written twice: {sorted(written)}")
    used = written + targets + [copy.source for copy in plan.state_copies]
    require(all(0 <= slot < num_states for slot in used), f"a slot of {sorted(set(used))} leaves {num_states} states")


def check_copies(copies: Sequence[BlockCopy], num_blocks: int) -> None:
    """Check that no copy reads a slot that an earlier copy wrote. If no copy reads such a slot, the order of the copies
    does not matter."""
    targets: set[int] = set()
    for copy in copies:
        inside = 0 <= copy.source < num_blocks and 0 <= copy.target < num_blocks
        require(inside, f"{copy} leaves the pool of {num_blocks} blocks")
        require(copy.source not in targets, f"a copy reads the target of an earlier one: {copies}")
        require(copy.target not in targets, f"a block is the target of two copies: {copies}")
        targets.add(copy.target)


def check_writes(plan: StepPlan, mirrors: Mirrors, block_size: int) -> None:
    """Check that no row writes into a block that is also in the block table of another row of this plan."""
    users = Counter(block for row in plan.rows for block in mirrors[row.seq_id].blocks)
    for row in plan.rows:
        first, last = row.start // block_size, (row.start + row.num_scheduled - 1) // block_size
        for block in mirrors[row.seq_id].blocks[first : last + 1]:
            require(users[block] == 1, f"sequence {row.seq_id} writes block {block}, which another row maps too")
