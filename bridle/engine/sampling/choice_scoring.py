"""Choices: the engine scores whole options after a prompt, and each output continues with the option that it samples.

When the prompt is computed, its last logits row scores the first tokens of the options. The other tokens of the options
are scored by forks of the sequence (*probes*). A probe is a fork that shares the sequence's KV, holds tokens of an
option, and samples nothing. The next steps compute all these forks, each step as many as it can take sequences. The
outputs wait while steps compute the scoring forks. When all options are scored, each output samples an option, whose
tokens are forced. If all options have only one token, no scoring fork and no further step are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from bridle.engine.control.controller_manager import ControllerManager
from bridle.engine.control.decision import Options
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sampling.option_draw import draw_option, probabilities
from bridle.engine.sampling.token_trie import Probe, Tokens, TokenTrie
from bridle.engine.scheduling.scheduler import Scheduled, Scheduler
from bridle.engine.scheduling.step_plan import SampleBatch, ScoreRun
from bridle.engine.sequence import Sequence, fork_key
from bridle.engine.sequence_state import SequenceStatus
from bridle.errors import BridleError
from bridle.outputs import OPTIONS, FinishReason, Logprob, Stored
from bridle.sampling import SamplingParams

#: Sampling parameters that restrict single tokens; a choice of whole options cannot apply them.
RESTRICTING = (
    "logit_bias",
    "bad_words_ids",
    "banned_phrases",
    "allowed_token_ids",
    "bias_texts",
    "watermark",
    "aligned",
)
#: Keeps the random keys of choices apart from those of forks.
_ORDINAL = 1 << 40


@dataclass(eq=False, slots=True)
class PendingChoice:
    """A choice in progress: the outputs that wait for it, and the scoring forks (probes) that are not computed yet."""

    options: Options
    trie: TokenTrie
    owners: list[Sequence]
    num_tokens: int  # tokens of the prompt, before the options
    sampling: SamplingParams | None = None  # the controller's parameters, in place of the owners' parameters
    probes: dict[int, tuple[Sequence, Probe]] = field(default_factory=dict)
    unbegun: list[Probe] = field(default_factory=list)  # probes that did not fit into the executor yet
    # continues an owner with its option; None: the option is forced
    take: Callable[[Sequence, Tokens], None] | None = None


#: For each score of a batch that belongs to a choice: the choice and the trie node that is scored.
Wanted = list[tuple[PendingChoice, int]]


class ChoiceScorer:
    """Begins choices while sampling rows are planned, and ends a choice when all its options are scored."""

    def __init__(
        self,
        scheduler: Scheduler,
        steering: ControllerManager,
        progress: OutputProcessor,
        new_id: Callable[[], int],
        max_probes: int | None = None,
    ) -> None:
        self._max_probes = max_probes  # limit of a backend with a fixed number of sequences; None: no limit
        self._scheduler = scheduler
        self._steering = steering
        self._progress = progress
        self._new_id = new_id
        self._by_probe: dict[int, PendingChoice] = {}
        self._by_owner: dict[int, PendingChoice] = {}

    @property
    def probe_ids(self) -> set[int]:
        """Return the sequence ids of the scoring forks. Scoring forks are queued, but belong to no output."""
        return set(self._by_probe)

    # -- before sampling ---------------------------------------------------------------------------------

    def begin(self, item: Scheduled, owners: list[Sequence], options: Options, batch: SampleBatch) -> Wanted:
        """Begin a choice after the last token of a logits row. Returns the trie nodes for which scores were added to
        `batch`."""
        trie = TokenTrie(options.tokens)
        answer = item.seq.control.answer
        choice = PendingChoice(options, trie, owners, item.end, answer.branches[0].sampling if answer else None)
        for owner in owners:
            owner.is_choosing = True
            self._by_owner[owner.id] = choice
        self._add_probes(choice, item.seq)
        return _ask(choice, item.seq.id, item.last_logit, 0, batch)

    def begin_scored(
        self,
        parent: Sequence,
        owners: list[Sequence],
        options: Mapping[Tokens, float],
        sampling: SamplingParams | None,
        take: Callable[[Sequence, Tokens], None],
    ) -> None:
        """Begin a choice after the last token of `parent`. The options begin with different tokens, whose
        log-probabilities are known. At least one option must have more than one token. For each waiting output, `take`
        is called with the option that was chosen for it, and continues the output with the option."""
        trie = TokenTrie(tuple(options))
        trie.logprobs = {trie.children[0][tokens[0]]: logprob for tokens, logprob in options.items()}
        choice = PendingChoice(Options(tuple(options)), trie, owners, len(parent.tokens), sampling, take=take)
        for owner in owners:
            owner.is_choosing = True
            self._by_owner[owner.id] = choice
        self._add_probes(choice, parent)

    def _add_probes(self, choice: PendingChoice, parent: Sequence) -> None:
        choice.unbegun = choice.trie.probes()[::-1]
        self._begin_probes(choice, parent)

    def _begin_probes(self, choice: PendingChoice, parent: Sequence) -> None:
        """Create the waiting scoring forks for which the step has room. If the parent was preempted, it has no KV to
        share, and its scoring forks are computed from their first token."""
        num_free = len(choice.unbegun) if self._max_probes is None else self._max_probes - len(self._by_probe)
        if not choice.unbegun or num_free < 1:
            return
        bare = replace(parent.request, guard=None, trace=False, detokenize=False)
        sampling = replace(
            parent.sampling,
            prompt_logprobs=0,
            logprobs=None,
            speculate=0,
            constraint_report=False,
            constraint_floor=None,
            lookahead=0,
            aligned=0,
        )
        for probe in [choice.unbegun.pop() for _ in range(min(num_free, len(choice.unbegun)))]:
            seq = parent.probe(self._new_id(), bare, sampling)
            if parent.queue.status is SequenceStatus.RUNNING:
                self._scheduler.add_fork(parent, seq)
            seq.begin_probing(probe.tokens)
            if parent.queue.status is not SequenceStatus.RUNNING:
                self._scheduler.add(seq)
            choice.probes[seq.id] = seq, probe
            self._by_probe[seq.id] = choice

    def score(self, item: Scheduled, batch: SampleBatch) -> Wanted:
        """Add to `batch` the scores that the logits rows of a scoring fork give."""
        choice = self._by_probe[item.seq.id]
        probe, wanted = choice.probes[item.seq.id][1], Wanted()
        first = max(item.seq.output.num_scored, item.row.start + 1)  # scores of recomputed tokens are known
        for depth in range(first - choice.num_tokens, item.end - choice.num_tokens + 1):
            node = probe.nodes.get(depth)
            if node is not None:
                row = item.last_logit + choice.num_tokens + depth - item.end
                wanted += _ask(choice, item.seq.id, row, node, batch)
        return wanted

    def undo(self, owner: Sequence) -> None:
        """Forget the choice of `owner` that began in a failed step. The choice begins again when the same row is
        computed again."""
        choice = self._by_owner.get(owner.id)
        if choice is not None:
            self._drop_probes(choice)
            for each in choice.owners:
                self._by_owner.pop(each.id, None)
                each.is_choosing = False

    # -- after sampling ----------------------------------------------------------------------------------

    def take(self, wanted: Wanted, scores: list[list[Logprob]], scheduled: list[Scheduled]) -> None:
        """Record the scores of a step, and end the choices whose options are all scored."""
        for (choice, node), (score,) in zip(wanted, scores, strict=True):
            choice.trie.logprobs[node] = score.logprob
        touched = dict.fromkeys(choice for choice, _ in wanted)
        for item in scheduled:
            own = self._by_probe.get(item.seq.id)
            if own is not None and item.end >= item.seq.target:
                self._remove(own, item.seq)
                touched[own] = None
            elif own is not None:
                item.seq.note_scored(item.end + 1)
        for choice in touched:
            if not choice.probes and not choice.unbegun and choice.owners:
                self._conclude(choice)
        self._begin_more()

    def _begin_more(self) -> None:
        """Begin waiting scoring forks in place of those that have ended, the forks of the oldest choice first."""
        if self._max_probes is not None:
            for choice in dict.fromkeys(self._by_owner.values()):
                self._begin_probes(choice, choice.owners[0])

    def _conclude(self, choice: PendingChoice) -> None:
        scores = choice.trie.scores()
        if choice.options.is_reported:
            seq = choice.owners[0]
            told = {"probabilities": probabilities(scores), "logprobs": scores}
            self._progress.events.append(Stored(seq.request.id, seq.index, OPTIONS, json.dumps(told).encode()))
        for owner in choice.owners.copy():
            self._let_go(choice, owner)
            random = fork_key(owner.key, _ORDINAL + owner.draws.num_draws, 0)
            tokens = choice.options.tokens[draw_option(scores, choice.sampling or owner.sampling, random)]
            if choice.take is not None:
                choice.take(owner, tokens)
                continue
            owner.count_draw()
            if owner.output.meter is not None:
                owner.output.meter.add_choice(scores, len(tokens))
            self._steering.force(owner, 0, tokens)

    # -- endings -----------------------------------------------------------------------------------------

    def end(self, seq: Sequence) -> None:
        """Record that an output ended while it waited for a choice."""
        choice = self._by_owner.get(seq.id)
        if choice is not None:
            self._let_go(choice, seq)
            if not choice.owners:
                self._drop_probes(choice)
                self._begin_more()

    def fail(self, probe: Sequence, error: BridleError | None) -> None:
        """End the outputs whose scoring fork failed. The outputs get the error of the scoring fork."""
        choice = self._by_probe.pop(probe.id, None)
        if choice is None:
            return
        del choice.probes[probe.id]
        for owner in choice.owners.copy():
            self._progress.finish(owner, FinishReason.ERROR, error=error)

    def _let_go(self, choice: PendingChoice, owner: Sequence) -> None:
        choice.owners.remove(owner)
        owner.is_choosing = False
        del self._by_owner[owner.id]

    def _drop_probes(self, choice: PendingChoice) -> None:
        choice.unbegun.clear()
        for seq, _ in [*choice.probes.values()]:
            self._remove(choice, seq)

    def _remove(self, choice: PendingChoice, probe: Sequence) -> None:
        del choice.probes[probe.id], self._by_probe[probe.id]
        self._scheduler.remove(probe)


def can_choose(seq: Sequence, options: Options) -> bool:
    """Return whether `seq` can choose among the options of its controller now. The options must fit into the output. No
    policy may apply to the text, and no sampling parameter may restrict single tokens."""
    if len(seq.tokens) + options.longest > seq.max_len:
        return False
    return seq.request.guard is None and not any(getattr(seq.sampling, name) for name in RESTRICTING)


def _ask(choice: PendingChoice, seq_id: int, row: int, node: int, batch: SampleBatch) -> Wanted:
    """Request the log-probabilities of all edges that leave `node`. Logits row `row` predicts the tokens of the node's
    edges."""
    edges = choice.trie.children[node]
    batch.scores += [ScoreRun(seq_id, row, (token,)) for token in edges]
    return [(choice, child) for child in edges.values()]
