"""Exchanges the messages of one step with a runtime in dialect 2: converts asks to operations and replies to answers.

An exchange of messages is open from `begin` until `receive` has returned its answers. Masks are copied out of shared
memory at once, because the next request frees their rows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from bridle.aici import protocol, replies
from bridle.aici.client.process import RuntimeProcess
from bridle.aici.masks import MaskReader
from bridle.engine.control.decision import Branch, Decision, Options, Splice
from bridle.engine.interfaces import Answer, Ask, StoredValue
from bridle.errors import ControllerError, InvalidRequest, ProtocolError
from bridle.sampling import DEFAULT_SAMPLING, OVERRIDABLE, SamplingParams

_log = logging.getLogger(__name__)
#: The line that a runtime writes into the log of a controller that is late.
_LATE = re.compile("\N{HOURGLASS WITH FLOWING SAND} late: [^\n]*\n")
#: Minimum number of seconds for which finished sequences wait for unfinished ones, because machines may be busy.
_GRACE = 0.005


class StepExchange(Protocol):
    """Interface of the protocol's dialects for the controller pool."""

    @property
    def is_open(self) -> bool: ...

    def begin(self, asks: Sequence[Ask], freed: Sequence[int], patience: float) -> None:
        """Send the asks. Raises `ProtocolError` if the runtime has ended."""

    def receive(self, timeout: float) -> dict[int, Answer] | None:
        """Wait for the answers; None if they did not arrive within `timeout` seconds. Raises `ProtocolError`."""


class Dialect2:
    """Exchange in dialect 2: one `mid_process`, whose reply has branches and splices."""

    def __init__(self, process: RuntimeProcess, vocab_size: int) -> None:
        self._process = process
        self._vocab_size = vocab_size
        self._masks = MaskReader(process.link.masks)
        self._asked: list[Ask] | None = None
        self._sampling_of: dict[int, SamplingParams] = {}  # sampling parameters of clients, by live sequence

    @property
    def is_open(self) -> bool:
        return self._asked is not None

    def begin(self, asks: Sequence[Ask], freed: Sequence[int], patience: float) -> None:
        """Send one `mid_process`. Callbacks may take `patience` seconds, because the engine computes for that long in
        any case."""
        for ask in asks:
            self._remember(ask)
        known = self._process.extensions
        message = protocol.MidProcess(ops=[_operation(ask, known) for ask in asks], freed=list(freed))
        if patience and "deadline_ms" in self._process.extensions:
            message.deadline_ms = round(1000 * patience, 3)
        if patience and "reply_ms" in self._process.extensions:
            message.reply_ms = round(1000 * (patience + max(0.1 * patience, _GRACE)), 3)
        self._process.send(protocol.encode(message))
        self._asked = list(asks)
        for seq_id in freed:
            self._sampling_of.pop(seq_id, None)

    def _remember(self, ask: Ask) -> None:
        if ask.request is not None:
            self._sampling_of[ask.seq_id] = ask.request.sampling
        elif ask.parent is not None and ask.parent in self._sampling_of:
            self._sampling_of[ask.seq_id] = self._sampling_of[ask.parent]

    def receive(self, timeout: float) -> dict[int, Answer] | None:
        """Wait for the reply and decode it; None if it did not arrive within `timeout` seconds."""
        reply = self._process.receive(timeout)
        if reply is None or self._asked is None:
            return None
        asked, self._asked = self._asked, None
        message = replies.decode_reply(reply, replies.MidData2)
        if not isinstance(message, replies.Ok):
            error = ControllerError(f"the control runtime refused the step: {message.error}")
            return {ask.seq_id: Answer(error=error) for ask in asked}
        return {ask.seq_id: self._answer(ask, message.data) for ask in asked}

    def _answer(self, ask: Ask, data: replies.MidData2) -> Answer:
        result = data.seqs.get(ask.seq_id)
        if result is None:
            return Answer(error=ControllerError("the control runtime gave no answer for this sequence"))
        answer = Answer(log=own_words(result.logs), stored=stored_values(result.storage))
        if ask.final:
            return answer
        if result.error or result.result is None:
            answer.error = ControllerError(result.error or "the controller failed without a word")
            return answer
        branches = result.result.branches
        if len(branches) == 1 and isinstance(branches[0].turns, int):
            answer.turns = branches[0].turns
        try:
            answer.decision = self._decision(ask.seq_id, branches, data)
            answer.ahead = self._ahead(ask.seq_id, result.ahead, data)
        except (ProtocolError, InvalidRequest) as error:
            answer.error = ControllerError(str(error))
        return answer

    def _ahead(
        self, seq_id: int, known: list[replies.LookaheadReply] | UnsetType, data: replies.MidData2
    ) -> tuple[tuple[int, Answer], ...]:
        """Return the answers that clones of the controller gave to draft tokens."""
        if not isinstance(known, list):
            return ()
        return tuple(
            (
                each.token,
                Answer(
                    self._decision(seq_id, each.branches, data),
                    log=own_words(each.logs),
                    stored=stored_values(each.storage),
                ),
            )
            for each in known
        )

    def _decision(self, seq_id: int, branches: list[replies.BranchReply], data: replies.MidData2) -> Decision:
        if len(branches) == 1 and branches[0].wait is True:
            named = branches[0].waits_for
            return Decision.wait(tuple(named) if isinstance(named, list) else None)
        made = tuple(self._branch(seq_id, branch, data) for branch in branches)
        texts = branches[0].options if len(branches) == 1 else UNSET
        options = Options(tuple(map(tuple, texts))) if isinstance(texts, list) else None
        return Decision(made, options=options)

    def _branch(self, seq_id: int, branch: replies.BranchReply, data: replies.MidData2) -> Branch:
        splices = tuple(
            Splice(splice.backtrack, tuple(splice.ff_tokens), frozenset(splice.when_sampled))
            for splice in branch.splices
        )
        scales = branch.control_vectors if isinstance(branch.control_vectors, dict) else None
        if branch.sample_mask is None:
            return Branch(sample=False, splices=splices, control_vectors=scales)
        first, stride = data.first_mask_byte_offset, data.mask_num_bytes
        mask = self._masks.bits(first, stride, branch.sample_mask, data.dtype, self._vocab_size)
        bias = tuple(branch.bias) if isinstance(branch.bias, list) else ()
        top = branch.top_logprobs if isinstance(branch.top_logprobs, int) else 0
        draft = tuple(branch.draft) if isinstance(branch.draft, list) else ()
        return Branch(True, mask, bias, self._sampling(seq_id, branch), splices, top, draft, scales)

    def _sampling(self, seq_id: int, branch: replies.BranchReply) -> SamplingParams | None:
        changes: dict[str, Any] = dict(branch.sampling) if isinstance(branch.sampling, dict) else {}
        if branch.temperature is not None:
            changes["temperature"] = branch.temperature
        if not changes:
            return None
        unknown = sorted(changes.keys() - OVERRIDABLE)
        if unknown:
            raise InvalidRequest(
                f"sampling has unknown parameters {', '.join(unknown)}; a controller may set {sorted(OVERRIDABLE)}"
            )
        return self._sampling_of.get(seq_id, DEFAULT_SAMPLING).with_(**changes)


def own_words(logs: str) -> str:
    """Return the controller's own log, without the line that the runtime adds about lateness. The line about lateness
    belongs only in the server's log."""
    if _LATE.fullmatch(logs) is None:
        return logs
    _log.debug("a controller is %s", logs.partition(" ")[2].rstrip())
    return ""


def stored_values(commands: list[replies.StorageCommand]) -> tuple[StoredValue, ...]:
    """Return a controller's writes to variables, in order, without its reads. Raises `ProtocolError` for an invalid
    command."""
    return tuple(_stored(command.write) for command in commands if isinstance(command.write, replies.WriteVar))


def _stored(write: replies.WriteVar) -> StoredValue:
    if write.op not in ("Set", "Append"):
        raise ProtocolError(f"malformed reply: a variable has op {write.op[:40]!r}; must be Set or Append")
    try:
        return StoredValue(write.name, bytes.fromhex(write.value), write.op == "Append")
    except ValueError as error:
        raise ProtocolError(f"malformed reply: the value of a variable cannot be read: {error}") from None


def _operation(ask: Ask, extensions: frozenset[str]) -> protocol.MidOp:
    op = protocol.MidOp(id=ask.seq_id, backtrack=ask.backtrack, tokens=list(ask.tokens), sampled=ask.sampled)
    if "turns" in extensions:
        op.turns = max(ask.turns, 1)
    if "ahead" in extensions:
        op.ahead = list(ask.ahead)
    op.foreseen = ask.num_foreseen  # only a runtime with clones knows this field
    op.variables = [(name, value.hex()) for name, value in ask.variables]
    if "changes" in extensions:
        op.changes = list[protocol.Change](ask.changes)
    if "probes" in extensions:
        op.probes = list(ask.probes)
    if ask.candidates is not None:
        op.candidates = list(ask.candidates)
    if ask.request is not None:
        op.req_id = ask.request.id
    elif ask.parent is not None:
        op.clone_id, op.clone_idx = ask.parent, ask.branch
    return op
