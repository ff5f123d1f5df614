"""Exchanges the messages of one step with a runtime that speaks dialect 1: the phases post, pre, then mid.

The pre phase comes before scheduling (suspend, forced tokens, number of forks). The mid phase runs during the forward
pass (bias rows, splices). The post phase comes after sampling (stop). All three phases run when the engine asks the
controllers about a step. If the pre phase decides without logits, its answer is final; otherwise the mid phase gives
the answer. The messages have their own sequence numbers, because dialect 1 numbers forks before the engine has made
them.

The runtime runs the pre phase for every live sequence, also if the engine did not ask about it. An answer for which the
engine did not ask is kept until the engine asks for it. The answer is dropped if the token of the last mid phase is not
sampled yet, because the controller cannot decide anew before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from bridle.aici import protocol, replies
from bridle.aici.client.dialect2 import own_words, stored_values
from bridle.aici.client.process import RuntimeProcess
from bridle.engine.control.decision import Branch, Decision, Splice, mask_words
from bridle.engine.interfaces import Answer, Ask, StoredValue
from bridle.errors import ControllerError, ProtocolError


@dataclass(slots=True)
class _Told:
    """State of a live sequence in dialect 1. `wire` is the sequence's number in the messages."""

    wire: int
    children: list[int] = field(default_factory=list)  # wire numbers of forks that the engine will make
    forced: bool = False  # its last answer forced tokens, so the runtime knows them
    draws: bool = False  # its last answer came from mid, and the sampled token was not reported
    stops: bool = False  # its last answer forced tokens, and the controller stops after them
    early: tuple[int, ...] = ()  # forced tokens of an answer without an ask
    log: str = ""
    stored: tuple[StoredValue, ...] = ()


class Dialect1:
    """Exchange in dialect 1: `post_pre_process` followed by `mid_process`."""

    def __init__(self, process: RuntimeProcess, vocab_size: int) -> None:
        self._process = process
        self._vocab_size = vocab_size
        self._wires = count()
        self._told: dict[int, _Told] = {}  # by the engine's sequence number
        self._asked: list[Ask] | None = None
        self._going: list[int] = []  # sequences freed by the current exchange
        self._answers: dict[int, Answer] = {}
        self._mid: list[tuple[int, list[int]]] | None = None  # (the engine's sequence number, wire numbers of its rows)

    @property
    def is_open(self) -> bool:
        return self._asked is not None

    def begin(self, asks: Sequence[Ask], freed: Sequence[int], patience: float) -> None:
        """Send `post_pre_process` with the changes that the asks report."""
        pre_ops = []
        for ask in asks:
            if ask.request is not None:
                self._told[ask.seq_id] = _Told(next(self._wires))
                pre_ops.append(protocol.PreOp(self._told[ask.seq_id].wire, ask.request.id))
            elif ask.parent is not None:
                self._adopt(ask.seq_id, ask.parent)
        post_ops = [op for ask in asks if (op := self._post_op(ask)) is not None]
        gone = self._unborn(asks) + self._wires_of(freed)
        message = protocol.PostPreProcess(post_ops=post_ops, pre_ops=pre_ops, freed=gone)
        self._process.send(protocol.encode(message))
        self._asked, self._going, self._answers, self._mid = list(asks), list(freed), {}, None

    def _adopt(self, seq_id: int, parent: int) -> None:
        """Give a forked sequence the message number that its parent's mid phase assigned to it."""
        told = self._told.get(parent)
        if told is not None and told.children:
            self._told[seq_id] = _Told(told.children.pop(0), draws=True)

    def _post_op(self, ask: Ask) -> protocol.PostOp | None:
        """Return the changes of the sequence since the engine last asked about it. Returns None if there are no
        changes, or if the runtime already knows the changes."""
        told = self._told.get(ask.seq_id)
        if told is None or ask.request is not None or not (ask.tokens or ask.backtrack):
            return None
        told.draws = False
        if told.forced:
            told.forced = False
            return None
        return protocol.PostOp(told.wire, list(ask.tokens), ask.backtrack + 1 if ask.backtrack else 0)

    def _unborn(self, asks: Sequence[Ask]) -> list[int]:
        """Return the message numbers of forks that the engine did not make, or that ended before the engine's first
        ask."""
        wires: list[int] = []
        for ask in asks:
            told = self._told.get(ask.seq_id)
            if told is not None:
                wires += told.children
                told.children = []
        return wires

    def _wires_of(self, freed: Sequence[int]) -> list[int]:
        known = [self._told[seq_id] for seq_id in freed if seq_id in self._told]
        return [wire for told in known for wire in (told.wire, *told.children)]

    def receive(self, timeout: float) -> dict[int, Answer] | None:
        """Wait for the answers, which come with one or two replies. Returns None if the answers did not arrive within
        `timeout` seconds."""
        deadline = time.monotonic() + timeout
        reply = self._process.receive(timeout)
        if reply is None or self._asked is None:
            return None
        if self._mid is None:
            if self._take_pre(reply):
                return self.receive(max(deadline - time.monotonic(), 0.0))
        else:
            self._take_mid(reply)
        for seq_id in self._going:
            self._told.pop(seq_id, None)
        answers, self._answers = self._answers, {}
        self._asked = self._mid = None
        return answers

    # -- post and pre ------------------------------------------------------------------------------------

    def _take_pre(self, reply: bytes) -> bool:
        """Process the decisions of the pre phase. Returns True if `mid_process` was sent for sequences that need it."""
        message = replies.decode_reply(reply, replies.PostPreData)
        self._mid = []
        if not isinstance(message, replies.Ok):
            self._fail_all(message.error)
            return False
        asked = {ask.seq_id: ask for ask in self._asked or ()}
        for ask in asked.values():
            self._answers[ask.seq_id] = self._answer_pre(ask, message.data)
        for seq_id in self._told.keys() - asked.keys():
            self._keep(seq_id, message.data)
        if not self._mid:
            return False
        ops = [protocol.MidOp(id=w, clone_id=None if w == ws[0] else ws[0]) for _, ws in self._mid for w in ws]
        self._process.send(protocol.encode(protocol.MidProcess(ops=ops)))
        return True

    def _answer_pre(self, ask: Ask, data: replies.PostPreData) -> Answer:
        told = self._told.get(ask.seq_id)
        if told is None:  # a fork that the runtime does not know
            return Answer(error=None if ask.final else ControllerError("this output has no controller in the runtime"))
        post, pre = data.post_seqs.get(told.wire), data.pre_seqs.get(told.wire)
        answer = Answer(log=told.log, stored=told.stored)
        told.log, told.stored = "", ()
        for result in (post, pre):
            if result is not None:
                answer.log += own_words(result.logs)
                answer.stored += stored_values(result.storage)
                if result.error and answer.error is None and not ask.final:
                    answer.error = ControllerError(result.error)
        if answer.error is not None or ask.final:
            return answer
        if told.stops or (post is not None and post.result is not None and post.result.stop):
            answer.decision = Decision.stop()
        elif pre is None or pre.result is None:
            answer.error = ControllerError("the control runtime gave no answer for this sequence")
        else:
            answer.decision = self._plan(ask.seq_id, told, pre.result)
        return answer

    def _plan(self, seq_id: int, told: _Told, pre: replies.PreResult) -> Decision | None:
        """Return the decision of the pre phase; None if the mid phase must decide."""
        tokens = (*told.early, *pre.ff_tokens)
        told.early = ()
        if tokens:
            told.forced, told.stops = True, pre.num_forks == 0
            return Decision.splice(0, tokens)
        if pre.num_forks == 0:
            return Decision.stop()
        if pre.suspend:
            return Decision.wait(())
        told.children = [next(self._wires) for _ in range(1, pre.num_forks)]
        told.draws = True
        if self._mid is not None:
            self._mid.append((seq_id, [told.wire, *told.children]))
        return None

    def _keep(self, seq_id: int, data: replies.PostPreData) -> None:
        """Keep the answer for a sequence that the engine did not ask about, until the engine asks about it."""
        told = self._told[seq_id]
        pre = data.pre_seqs.get(told.wire)
        if pre is None:
            return
        told.log += own_words(pre.logs)
        told.stored += stored_values(pre.storage)
        if pre.error:
            self._answers[seq_id] = Answer(error=ControllerError(pre.error), log=told.log, stored=told.stored)
        elif pre.result is not None and not told.draws:
            told.early += tuple(pre.result.ff_tokens)

    # -- mid ---------------------------------------------------------------------------------------------

    def _take_mid(self, reply: bytes) -> None:
        message = replies.decode_reply(reply, replies.MidData1)
        if not isinstance(message, replies.Ok):
            self._fail_all(message.error)
            return
        row = 0
        for seq_id, wires in self._mid or ():
            answer = self._answers[seq_id]
            branches = []
            for wire in wires:
                result = message.data.seqs.get(wire)
                if result is None or result.error:
                    answer.error = ControllerError(result.error if result else "no answer for this sequence")
                if result is not None:
                    answer.log += own_words(result.logs)
                    answer.stored += stored_values(result.storage)
                    branches.append(self._branch(row, result.result))
                row += 1
            if answer.error is None:
                answer.decision = Decision.fork(branches)

    def _branch(self, row: int, result: replies.MidResult | None) -> Branch:
        if result is None:
            return Branch(mask=self._mask(row))
        return Branch(sample=False, splices=(Splice(max(result.backtrack - 1, 0), tuple(result.ff_tokens)),))

    def _mask(self, row: int) -> bytes | None:
        """Return row `row` of the dense f32 matrix as a bit row; None if the row does not prefer any token."""
        width, masks = self._process.vocab_size, self._process.link.masks
        if 4 * width * (row + 1) > len(masks):
            raise ProtocolError(
                f"mask row {row} ({width} tokens) is outside the shared memory of masks, {len(masks)} bytes"
            )
        values = np.frombuffer(masks, np.float32, count=width, offset=4 * width * row)
        if values.min() == values.max():
            return None
        bits = np.packbits(values > -50.0, bitorder="little").tobytes()
        size = 4 * mask_words(self._vocab_size)
        return bits[:size].ljust(size, b"\0")

    def _fail_all(self, error: str) -> None:
        for ask in self._asked or ():
            self._answers[ask.seq_id] = Answer(error=ControllerError(f"the control runtime failed: {error}"))
