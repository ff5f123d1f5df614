"""Decides which tokens the next step computes.

There are no phases: every ready sequence wants `tokens[num_computed:target]` computed. A sequence gets as many tokens
as the token budget and the KV blocks allow. A step mixes decoding with chunks of prompts. Sequences that hold KV blocks
come first. Each sequence gets one token before any sequence gets a second one. After the sequences with blocks, waiting
sequences are admitted in order of priority, place and arrival, so that none starves (`admission_order`). If several
prompts need tokens, up to half of the prompt budget goes to the shortest prompts, including waiting ones
(`prefill_sharing`). Queued prompts may have to wait until the streams have run for a while (`PrefillGate`). Without
chunked prefill, each prompt is computed as a whole, in a step without decoding. The scheduler uses no sampling,
controllers or text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.multimodal.encoder_scheduler import EncoderScheduler
from bridle.engine.multimodal.multimodal_inputs import align_to_item
from bridle.engine.scheduling.admission_order import PrefillGate, admission_order, overtaken_levels
from bridle.engine.scheduling.lora_scheduler import LoRAScheduler
from bridle.engine.scheduling.prefill_sharing import PromptShares
from bridle.engine.scheduling.sequence_queues import SequenceQueues, urgency
from bridle.engine.scheduling.step_plan import BlockCopy, PlanRow, StepPlan
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import SequenceStatus
from bridle.engine.spec_decode.proposers import Drafts
from bridle.engine.spec_decode.speculation import Speculation

_Pick = tuple[Sequence, int, list[BlockCopy]]  # a sequence, its number of tokens, and block copies for it
_Picked = dict[int, _Pick]
_NO_COPIES: list[BlockCopy] = []
#: Number of logits rows that a step may have for draft tokens, even if it has few sequences.
_DRAFTED_ROWS = 64


@dataclass(slots=True)
class Scheduled:
    """One row of a plan, with its sequence. `drafts` are the draft tokens after position `end`. `sample_row` is the
    sampling row if the sequence gains exactly one sampled token after this row; else it is -1."""

    seq: Sequence
    row: PlanRow
    last_logit: int  # logits row of the last token before the drafts
    end: int  # position after the last token before the drafts
    drafts: tuple[int, ...] = ()
    sample_row: int = -1


class Scheduler(SequenceQueues):
    """Plans steps: `schedule` makes a plan, and `commit` records that the plan was computed."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        *,
        max_batch_prefill_tokens: int | None = None,
        chunked_prefill: bool = True,
        gate: PrefillGate | None = None,
        priority_seconds: float = 10.0,
        kv: Literal["paged", "sequences"] = "paged",
        clock: Callable[[], float] = time.monotonic,
        rotation: LoRAScheduler | None = None,
        media: EncoderScheduler | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        super().__init__(blocks, kv, clock, media or EncoderScheduler(), speculation or Speculation())
        self.rotation = rotation or LoRAScheduler(max_num_seqs)
        self._priority_seconds = priority_seconds
        self.max_num_batched_tokens = max(max_num_batched_tokens, 1)
        self.max_num_seqs = max_num_seqs
        self.max_batch_prefill_tokens = min(max_batch_prefill_tokens or max_num_batched_tokens, max_num_batched_tokens)
        self._in_chunks = chunked_prefill
        self._gate = gate or PrefillGate()
        self._prompt_budget = 0  # prompt tokens left in the step that is being planned
        self._shares: dict[int, int] = {}  # tokens of the step reserved for sequences, by id
        self._prompt_shares = PromptShares(blocks)
        self.is_paused = False  # no step is planned while this is true; written by the engine
        self._step = 0
        self._cursor = 0  # where the next step starts if some running sequences did not fit

    # -- planning ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the number of the last planned step."""
        return self._step

    @property
    def is_searching(self) -> bool:
        """Return whether sequences are computed alone, to find the sequence that makes steps fail."""
        return bool(self._suspects)

    def schedule(self, has_drafts: bool = True) -> tuple[StepPlan, list[Scheduled]]:
        """Return the next plan, and its rows together with their sequences. The plan contains draft tokens only if
        `has_drafts` is true."""
        self._step += 1
        if self.blocks.states.is_used:
            for seq in self.running.values():
                self.blocks.settle(seq)
        if self.rotation.num_users:
            self.rotation.begin_step(self.running.values(), self._next_in_line(), self.waiting)
        if self.media.num_users:
            self.media.begin_step(self.running.values(), self._next_in_line(), self.waiting, self.blocks.match_prefix)
        if self.stored is not None and (self.waiting or self.stored.is_loading):
            is_busy = any(seq.is_ready for seq in self.running.values())
            self.stored.begin_step(self._next_in_line(), is_busy)
        picked = self._pick_suspect() if self._suspects else self._pick()
        plan = StepPlan(self._step, forks=self._forks, freed=self._freed)
        self._forks, self._freed = [], []
        for _, _, copies in picked:  # in the order in which the blocks were allocated
            if copies:
                plan.copies.extend(copies)
        drafts: Drafts = {}
        if self.speculation.is_used and has_drafts and not self._suspects:
            drafts = self._draft(picked, plan)
        if self.rotation.num_users:
            picked.sort(key=_adapter)  # rows of one adapter are adjacent; rows without adapter come first
        scheduled = []
        num_logits = 0
        for seq, num_tokens, _ in picked:
            drafted = drafts.get(seq.id, ())
            row = seq.plan_row(num_tokens, drafted)
            if self.blocks.states.is_used:
                self.blocks.states.plan(seq, row, row.start + num_tokens)
            plan.rows.append(row)
            num_logits += row.num_logits
            last_logit = num_logits - 1 - len(drafted)
            scheduled.append(Scheduled(seq, row, last_logit, row.start + num_tokens, drafted))
        if self.blocks.states.is_used:
            plan.state_copies = self.blocks.states.take_copies()
        return plan, scheduled

    def _draft(self, picked: list[_Pick], plan: StepPlan) -> Drafts:
        """Return draft tokens for the picked sequences, as many as fit into the step and the free blocks."""
        num_tokens = sum(count for _, count, _ in picked)
        room = min(self.max_num_batched_tokens - num_tokens, max(self.max_num_seqs, _DRAFTED_ROWS) - len(picked))
        complete = {seq.id: (seq, count) for seq, count, _ in picked if seq.kv.num_computed + count == len(seq.tokens)}
        drafts = self.speculation.draft([seq for seq, _ in complete.values()], num_tokens, room)
        for seq_id in list(drafts):
            seq, count = complete[seq_id]
            fitting = self._shorten(seq, count + len(drafts[seq_id])) - count
            if fitting > 0:
                drafts[seq_id] = drafts[seq_id][:fitting]
                plan.copies.extend(self.blocks.allocate(seq, seq.kv.num_computed + count + fitting))
            else:
                del drafts[seq_id]
        return drafts

    def _next_in_line(self) -> list[Sequence]:
        """Return the waiting sequences that fit into a step, except those that wait for their controllers."""
        num_seats = self.max_num_seqs - len(self.running)
        if num_seats <= 0 or not self.waiting:
            return []
        order = admission_order(self.waiting, self._priority_seconds)
        return [seq for seq in order if not seq.is_held][:num_seats]

    def _pick(self) -> list[_Pick]:
        picked: _Picked = {}
        if not self._in_order:
            self.running = dict(sorted(self.running.items(), key=lambda item: urgency(item[1])))
            self._in_order = True
        ready = [seq for seq in self.running.values() if seq.is_ready]  # the most urgent first
        self._prompt_budget = self._prefill_tokens(ready)
        is_open = self._gate.is_always_open or self._gate.is_open(
            sum(seq.is_ready for seq in self.waiting), sum(not seq.kv.is_prefilling for seq in ready)
        )
        if self._in_chunks:
            ready = self._rotate(ready)  # so that no tokens are reserved for sequences left out of this step
            self._share_out(ready, is_open)
            budget = self._pick_running(picked, ready)
            if is_open:
                self._pick_waiting(picked, budget)
            self._shares = {}
        else:
            self._pick_whole(picked, ready, is_open)
        if not self._gate.is_always_open:
            had_prompts = any(seq.kv.is_prefilling for seq, _, _ in picked.values())
            self._gate.note(had_prompts=had_prompts, had_decodes=bool(picked))
        return list(picked.values())

    def _prefill_tokens(self, ready: list[Sequence]) -> int:
        """Return how many tokens a step may compute of prompts, and of other sequences with several uncomputed tokens.
        The limit protects the speed of decoding outputs. If all sequences only score options (probes), only the limit
        of the whole step applies, because no output waits."""
        if self._in_chunks and ready and all(seq.is_probe for seq in ready):
            return self.max_num_batched_tokens
        return self.max_batch_prefill_tokens

    def _share_out(self, ready: list[Sequence], is_open: bool) -> None:
        """If several prompts need tokens, reserve part of the prompt budget for the shortest ones."""
        several = [seq for seq in ready if seq.kv.is_prefilling or len(seq.tokens) - seq.kv.num_computed > 1]
        begun = [(seq, num_wanted) for seq in several if (num_wanted := self._num_wanted(seq)) > 0]
        has_queue = is_open and len(self.running) < self.max_num_seqs
        if len(begun) + has_queue * len(self.waiting) < 2:
            return
        self._prompt_shares.begin(self.running.values())
        num_decoding = sum(not seq.kv.is_prefilling for seq in ready)
        budget = min(self._prompt_budget, self.max_num_batched_tokens - num_decoding)
        order = admission_order(self.waiting, self._priority_seconds) if has_queue else []
        self._shares = self._prompt_shares.split(budget, begun, order)
        if self._shares:
            self._prompt_budget = budget - sum(self._shares.values())

    def _num_wanted(self, seq: Sequence) -> int:
        """Return how many tokens of the prompt budget a running sequence could use."""
        end = self.media.max_computable(seq) if seq.runs else seq.target
        return end - seq.kv.num_computed - (not seq.kv.is_prefilling)

    def _pick_whole(self, picked: _Picked, ready: list[Sequence], is_open: bool) -> None:
        """Pick prompts, each computed as a whole. If no prompt may be computed now, pick the decoding sequences."""
        self._pick_running(picked, self._rotate([seq for seq in ready if seq.kv.is_prefilling]))
        if is_open:
            self._pick_waiting(picked, self._prompt_budget)
        if not picked:
            self._pick_running(picked, self._rotate([seq for seq in ready if not seq.kv.is_prefilling]))

    def _pick_running(self, picked: _Picked, ready: list[Sequence]) -> int:
        """Give each decoding sequence a token. The further uncomputed tokens of a decoding sequence, and all tokens of
        a prompt, count against the prompt budget. Returns the number of tokens that are left in the step's budget."""
        budget = self.max_num_batched_tokens
        first = self.media.next_starved(ready, self._step) if self.media.crowded_out else None
        if first is not None:
            ready = [first, *(seq for seq in ready if seq is not first)]
            self._prompt_budget += sum(self._shares.values())
            self._shares = {}
        unserved = len(ready)
        is_plain = not (self._shares or self._by_sequence)
        for seq in ready:
            unserved -= 1
            kv = seq.kv
            if is_plain and budget > 0 and kv.num_computed + 1 == len(seq.tokens) and self._is_plain_decode(seq):
                picked[seq.id] = seq, 1, _NO_COPIES
                budget -= 1
                continue
            if self._shares:
                self._prompt_budget += self._shares.pop(seq.id, 0)
            if seq.queue.status is not SequenceStatus.RUNNING:
                continue  # preempted just now, for another sequence
            if self._by_sequence:
                self.blocks.truncate(seq)
            if budget <= 0:
                break  # an image that did not fit before has taken the whole step
            end = self.media.max_computable(seq) if seq.runs else seq.target
            num_tokens = min(end - kv.num_computed, max(budget - unserved, 1))
            num_own = 0 if kv.is_prefilling else 1
            num_tokens = min(num_tokens, num_own + self._prompt_budget)
            if seq.runs:
                room = budget if seq is first else max(budget - unserved, 1)
                num_tokens = self.media.uncut(seq, num_tokens, min(room, self._prompt_budget))
            if num_tokens == 0:
                continue
            self._prompt_budget -= num_tokens - num_own
            if self.blocks.can_write(seq, kv.num_computed + num_tokens):
                picked[seq.id] = seq, num_tokens, _NO_COPIES
            elif num_tokens := self._make_room(seq, num_tokens, picked):
                picked[seq.id] = seq, num_tokens, self.blocks.allocate(seq, kv.num_computed + num_tokens)
            budget -= num_tokens
        return budget

    def _is_plain_decode(self, seq: Sequence) -> bool:
        """Return whether the only uncomputed token of `seq` can be computed without any allocation or check."""
        is_open = not (seq.kv.is_prefilling or seq.runs) and seq.output.ending is None
        return is_open and seq.queue.status is SequenceStatus.RUNNING and self.blocks.can_append(seq)

    def _rotate(self, ready: list[Sequence]) -> list[Sequence]:
        """Return as many of the sequences as fit into one step. Each step begins with the sequence that follows the
        last sequence of the previous step."""
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        if len(ready) <= most:
            return ready
        start = self._cursor % len(ready)
        self._cursor = start + most
        return (ready + ready)[start : start + most]

    def _pick_waiting(self, picked: _Picked, budget: int) -> None:
        """Admit waiting sequences in order, as long as the KV cache has room for all tokens of each sequence. Only
        sequences with reserved tokens may overtake other sequences."""
        most = self._prompt_budget + sum(self._shares.values())
        if not self.waiting or min(budget, most) <= 0 or len(self.running) >= self.max_num_seqs:
            return
        self._prompt_shares.begin(self.running.values())
        queue = self.waiting
        levels: Iterable[int] = repeat(queue[0].queue.level)
        if queue[0].queue.level != queue[-1].queue.level:
            queue = admission_order(queue, self._priority_seconds)
            levels = overtaken_levels(queue)
        self.waiting = []
        kept: list[Sequence] = []
        num_provided = 0  # sequences that wait for others to compute their beginning
        has_room, num_seen = True, 0
        for seq, level in zip(queue, levels, strict=False):
            is_next = has_room and self._prompt_budget > 0
            if budget <= 0 or len(self.running) + num_provided >= self.max_num_seqs or not (is_next or self._shares):
                break
            share = self._shares.pop(seq.id, 0)
            self._prompt_budget += share
            room = min(budget, self._prompt_budget)
            if not seq.is_ready or not (is_next or share):
                kept.append(seq)
            elif picked and self._is_provided(seq, picked):
                num_provided += 1
                kept.append(seq)
            elif not self._admit_in_turn(seq, room, picked, has_room):
                has_room = False
                kept.append(seq)
            else:
                if level < seq.queue.level:
                    self._raise_to(level, seq)
                num_tokens = self._begin(seq, room, picked)
                budget -= num_tokens
                self._prompt_budget -= num_tokens
            num_seen += 1
        self.waiting = sorted(self.waiting + kept + queue[num_seen:], key=urgency)

    def _begin(self, seq: Sequence, room: int, picked: _Picked) -> int:
        """Pick as many tokens of an admitted sequence as the step has room for. Returns their number."""
        num_tokens = min(seq.target - seq.kv.num_computed, room)
        if seq.runs:
            num_tokens = min(self.media.max_computable(seq) - seq.kv.num_computed, room)
            num_tokens = self.media.uncut(seq, num_tokens, room)
        if num_tokens > 0:  # 0 if an image is needed again, because less is cached now
            picked[seq.id] = seq, num_tokens, self.blocks.allocate(seq, seq.kv.num_computed + num_tokens)
        self._prompt_shares.add(seq)
        return num_tokens

    def _is_provided(self, seq: Sequence, picked: _Picked) -> bool:
        """Return whether another sequence computes the first uncached block of `seq` in this step. Queued prompts are
        computed together if they would otherwise wait for each other."""
        if not (self._in_chunks and self._gate.is_always_open):
            return False
        provider = self._prompt_shares.provider(seq)
        return provider is not None and provider.id in picked

    def _admit_in_turn(self, seq: Sequence, room: int, picked: _Picked, has_room: bool) -> bool:
        """Admit `seq` if the step and the KV cache have room for it. `has_room`: all sequences before `seq` were
        admitted."""
        if not self._in_chunks and not self._fits_whole(seq, room, picked):
            return False
        return self._admit_over_suspended(seq) if has_room else self._admit(seq, self._prompt_shares.num_owed)

    def _fits_whole(self, seq: Sequence, budget: int, picked: Iterable[int]) -> bool:
        """Return whether all uncomputed tokens of `seq` fit into the step. A sequence that is too long for any step is
        computed in a step without others."""
        return not picked or seq.target - self.blocks.match_prefix(seq) <= budget

    def _admit_over_suspended(self, seq: Sequence) -> bool:
        """Admit `seq`. If necessary, preempt sequences whose controllers wait, because the controllers might wait for
        this sequence."""
        while not self._admit(seq, self._prompt_shares.num_owed):
            idle = [s for s in self.running.values() if s.control.is_suspended and self.blocks.num_exclusive(s)]
            if not idle:
                return False
            self.preempt(max(idle, key=urgency))
            self._prompt_shares.begin(self.running.values())
        return True

    def _pick_suspect(self) -> list[_Pick]:
        """After a failed step, pick one of its sequences alone, to find the sequence that makes steps fail."""
        live = [s for s in (*self.running.values(), *self.waiting) if s.id in self._suspects and s.is_ready]
        if not live:
            self._suspects.clear()
            return self._pick()
        seq = live[0]
        if seq.queue.status is SequenceStatus.WAITING:
            while not self._admit(seq):
                victim = self._victim(seq, ())
                if victim is None:
                    return []
                self.preempt(victim)
            self.waiting.remove(seq)
        num_tokens = min(self.media.max_computable(seq) - seq.kv.num_computed, self.max_batch_prefill_tokens)
        num_tokens = (
            align_to_item(seq.runs, seq.kv.num_computed, seq.kv.num_computed + num_tokens) - seq.kv.num_computed
        )
        num_tokens = self._make_room(seq, num_tokens, {})
        if not num_tokens:
            return []
        return [(seq, num_tokens, self.blocks.allocate(seq, seq.kv.num_computed + num_tokens))]

    # -- after the step ----------------------------------------------------------------------------------

    def commit(self, scheduled: list[Scheduled]) -> None:
        """Record that the plan was computed: advance the counters, and add full blocks to the prefix cache."""
        size, has_states = self.blocks.block_size, self.blocks.states.is_used
        for item in scheduled:
            seq, kv = item.seq, item.seq.kv
            kv.num_computed = item.end
            if kv.is_prefilling and item.end >= seq.target:
                kv.is_prefilling = False
            if kv.num_hashed < item.end // size or has_states:
                self.blocks.publish(seq)
        if self._suspects:
            self._suspects.difference_update(item.seq.id for item in scheduled)

    def advance(self, seq: Sequence) -> None:
        """Record that a draft token was accepted. The KV of the draft token was computed in this step."""
        seq.kv.num_computed += 1
        self.blocks.publish(seq)

    def commit_drafts(self, item: Scheduled, num_right: int, num_guessed: int, num_drawn: int) -> None:
        """Drop the draft tokens of a row, except the first `num_right`. `num_guessed` draft tokens were uncertain (not
        forced), and `num_drawn` of them were sampled. If fewer tokens were predicted than drafted, no token may be left
        to compute; then the last token is computed again for its logits."""
        seq = item.seq
        self.speculation.guessing.learn(seq, num_guessed, num_drawn)
        if not seq.is_finished:
            seq.clamp_computed()
            seq.kv.num_mirrored_tokens = min(seq.kv.num_mirrored_tokens, item.end + num_right)
            if not self._by_sequence:
                self.blocks.truncate(seq)


def _adapter(pick: _Pick) -> str:
    """Return the sort key of a row in a plan: the adapter of its sequence."""
    return pick[0].request.adapter or ""
