"""One step's conversation with a runtime of the first generation: post, pre, then mid.

That dialect has a phase before scheduling (suspend, forced tokens, number of forks), one under the forward pass (bias
rows, splices) and one after sampling (stop). They map onto the engine's verbs: all three run when the engine asks;
what pre decides without a logits row is answered at once, everything else is answered by mid. Sequence numbers on
the wire are the exchange's own, since that dialect numbers forks before the engine has made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from bridle.aici import protocol
from bridle.aici.client.exchange import stored_values
from bridle.aici.client.process import RuntimeProcess
from bridle.engine.decision import Branch, Decision, Splice, mask_words
from bridle.engine.interfaces import Answer, Ask
from bridle.errors import ControllerError

_PreResults = dict[int, protocol.SeqResult[protocol.PreResult]]


class Dialect1:
    """`post_pre_process` followed by `mid_process`, as one exchange."""

    def __init__(self, process: RuntimeProcess, vocab_size: int) -> None:
        self._process = process
        self._vocab_size = vocab_size
        self._ids = count()
        self._wire: dict[int, int] = {}  # the engine's id -> ours
        self._branches: dict[int, list[int]] = {}  # the engine's id -> our ids of its forks to come
        self._told: dict[int, tuple[int, ...]] = {}  # forced tokens that the runtime knows of already
        self._asked: list[Ask] | None = None
        self._answers: dict[int, Answer] = {}
        self._mid: list[tuple[int, list[int]]] | None = None  # (the engine's id, our ids of its rows)

    @property
    def is_open(self) -> bool:
        return self._asked is not None

    def begin(self, asks: Sequence[Ask], freed: Sequence[int], patience: float) -> None:
        """Send `post_pre_process`."""
        pre_ops, post_ops = [], []
        for ask in asks:
            if ask.request is not None:
                self._wire[ask.seq_id] = next(self._ids)
                pre_ops.append(protocol.PreOp(self._wire[ask.seq_id], ask.request.id))
            elif ask.parent is not None and self._branches.get(ask.parent):
                self._wire[ask.seq_id] = self._branches[ask.parent].pop(0)
            if (op := self._post_op(ask)) is not None:
                post_ops.append(op)
        message = protocol.PostPreProcess(post_ops=post_ops, pre_ops=pre_ops, freed=self._freed(freed))
        self._process.send(protocol.encode(message))
        self._asked, self._answers, self._mid = list(asks), {}, None

    def _post_op(self, ask: Ask) -> protocol.PostOp | None:
        """What happened to the sequence, unless nothing did or the runtime knows."""
        if self._told.pop(ask.seq_id, None) == ask.tokens or not (ask.tokens or ask.backtrack):
            return None
        if ask.request is not None:
            return None
        backtrack = ask.backtrack + 1 if ask.backtrack else 0
        return protocol.PostOp(self._wire[ask.seq_id], list(ask.tokens), backtrack)

    def _freed(self, freed: Sequence[int]) -> list[int]:
        wires: list[int] = []
        for seq_id in freed:
            wires += self._branches.pop(seq_id, [])
            self._told.pop(seq_id, None)
            if seq_id in self._wire:
                wires.append(self._wire.pop(seq_id))
        return wires

    def receive(self, timeout: float) -> dict[int, Answer] | None:
        """Take one reply; after the first, `mid_process` is sent and None returned unless it is there too."""
        reply = self._process.receive(timeout)
        if reply is None or self._asked is None:
            return None
        if self._mid is None:
            if self._take_pre(reply):
                return self.receive(timeout)
        else:
            self._take_mid(reply)
        answers, self._answers = self._answers, {}
        self._asked = self._mid = None
        return answers

    # -- post and pre ------------------------------------------------------------------------------------

    def _take_pre(self, reply: bytes) -> bool:
        """Decide what can be decided; True if `mid_process` was sent for the rest."""
        message = protocol.decode_reply(reply, protocol.PostPreData)
        self._mid = []
        if not isinstance(message, protocol.Ok):
            self._fail_all(message.error)
            return False
        for ask in self._asked or ():
            self._take_pre_of(ask, message.data)
        if self._mid:
            ops = []
            for _, wires in self._mid:
                ops.append(protocol.MidOp(id=wires[0]))
                ops += [protocol.MidOp(id=wire, clone_id=wires[0]) for wire in wires[1:]]
            message_out = protocol.MidProcess(ops=ops)
            self._process.send(protocol.encode(message_out))
        return bool(self._mid)

    def _take_pre_of(self, ask: Ask, data: protocol.PostPreData) -> None:
        wire = self._wire.get(ask.seq_id, -1)
        post, pre = data.post_seqs.get(wire), data.pre_seqs.get(wire)
        answer = self._answers[ask.seq_id] = Answer()
        for result in (post, pre):
            if result is not None:
                answer.log += result.logs
                answer.stored += stored_values(result.storage)
                if result.error and answer.error is None and not ask.final:
                    answer.error = ControllerError(result.error)
        if answer.error is not None or ask.final:
            return
        if post is not None and post.result is not None and post.result.stop:
            answer.decision = Decision.stop()
        elif pre is None or pre.result is None:
            answer.error = ControllerError("the control runtime gave no answer for this sequence")
        else:
            answer.decision = self._plan(ask.seq_id, wire, pre.result)

    def _plan(self, seq_id: int, wire: int, pre: protocol.PreResult) -> Decision | None:
        """What pre decides by itself; None if the callback under the forward pass decides."""
        if pre.num_forks == 0:
            return Decision.stop()
        if pre.suspend:
            return Decision.wait()
        if pre.ff_tokens:
            self._told[seq_id] = tuple(pre.ff_tokens)
            return Decision.splice(0, pre.ff_tokens)
        children = [next(self._ids) for _ in range(1, pre.num_forks)]
        self._branches[seq_id] = children.copy()
        if self._mid is not None:
            self._mid.append((seq_id, [wire, *children]))
        return None

    # -- mid ---------------------------------------------------------------------------------------------

    def _take_mid(self, reply: bytes) -> None:
        message = protocol.decode_reply(reply, protocol.MidData1)
        if not isinstance(message, protocol.Ok):
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
                else:
                    answer.log += result.logs
                    answer.stored += stored_values(result.storage)
                    branches.append(self._branch(row, result.result))
                row += 1
            if answer.error is None:
                answer.decision = Decision.fork(branches)

    def _branch(self, row: int, result: protocol.MidResult | None) -> Branch:
        if result is None:
            return Branch(mask=self._mask(row))
        return Branch(sample=False, splices=(Splice(max(result.backtrack - 1, 0), tuple(result.ff_tokens)),))

    def _mask(self, row: int) -> bytes | None:
        """Row `row` of the dense f32 matrix as bits; None if it prefers nothing."""
        width = self._process.vocab_size
        values = np.frombuffer(self._process.link.masks, np.float32, count=width, offset=4 * width * row)
        if values.min() == values.max():
            return None
        bits = np.packbits(values > -50.0, bitorder="little").tobytes()
        size = 4 * mask_words(self._vocab_size)
        return bits[:size].ljust(size, b"\0")

    def _fail_all(self, error: str) -> None:
        for ask in self._asked or ():
            self._answers[ask.seq_id] = Answer(error=ControllerError(f"the control runtime failed: {error}"))
