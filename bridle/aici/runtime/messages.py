"""Messages between the supervisor and its workers: msgpack arrays, over rings (steps) and sockets (all other messages).

`key` identifies an instance for its whole life, whatever sequence numbers the engine uses. The messages are internal:
both processes always have the same version.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from bridle.aici.replies import BranchReply, MidResult, PreResult, WriteVar


class WorkerMessage(Struct, array_like=True, tag=True):
    pass


# -- a step ------------------------------------------------------------------------------------------------


class Step2(WorkerMessage):
    """One op of a D2 engine. `parent` is the key to fork from, `branch` the number of the branch. `variables` are set
    first: names, and values in hexadecimal. The first `foreseen` of the tokens were sampled as shown to clones of the
    guest. The tokens `ahead` are shown to clones after the guest's answer. `changes` are passed on to the guest."""

    key: int
    seq_id: int
    backtrack: int
    tokens: list[int]
    sampled: int | None
    group: list[int]
    parent: int | None = None
    branch: int = 0
    candidates: list[tuple[int, float]] | None = None
    turns: int = 1
    variables: list[tuple[str, str]] = []
    foreseen: int = 0
    ahead: list[int] = []
    changes: list[tuple[int, int, int, str]] = []
    probes: list[float] = []


class PostPre(WorkerMessage):
    """One sequence in a D1 engine's post_pre_process. If `tokens` is None, the last step is not reported to the
    guest."""

    key: int
    seq_id: int
    tokens: list[int] | None
    backtrack: int


class Mid1(WorkerMessage):
    """One op of a D1 engine's mid_process."""

    key: int
    seq_id: int
    group: list[int]
    parent: int | None = None
    branch: int = 0


class WorkerBatch(WorkerMessage, tag="Batch"):
    """All work of a worker in a step. `budget_ms` is the CPU time limit of one callback. `patience_ms` is the CPU time
    limit of all callbacks of an op together, until the guest was late too often."""

    number: int
    ops: list[Step2 | PostPre | Mid1]
    budget_ms: float
    patience_ms: float


class ChosenBranches(WorkerMessage, tag="Chosen"):
    """D2: branches, whose `sample_mask` is an index into the answer's `masks`. `turns` is how often in a row a guest
    that does nothing was asked."""

    branches: list[BranchReply]
    turns: int = 1


class PhaseResults(WorkerMessage, tag="Phases"):
    """D1: results of post (None: it did not run) and of pre. Logs and writes of post are separate from the answer's."""

    stop: bool | None
    pre: PreResult
    post_logs: str = ""
    post_storage: list[WriteVar] = []
    post_micros: int = 0


class Sampled(WorkerMessage):
    """D1: the result of mid. The answer always has a mask."""

    splice: MidResult | None


class LookaheadAnswer(WorkerMessage, tag="Foreseen"):
    """Answer of a clone to a draft token, with the fields of `ChosenBranches`, and its log output."""

    token: int
    branches: list[BranchReply]
    masks: list[memoryview]
    logs: str = ""
    storage: list[WriteVar] = []


class SequenceAnswer(WorkerMessage, tag="Answer"):
    """The answer of one sequence. `failed_in_post` marks an error of D1's post phase; `ahead` are the clones' answers
    to likely tokens."""

    key: int
    error: str
    logs: str
    storage: list[WriteVar]
    micros: int
    result: ChosenBranches | PhaseResults | Sampled | None
    masks: list[memoryview]
    failed_in_post: bool = False
    ahead: list[LookaheadAnswer] = []

    @property
    def num_mask_bytes(self) -> int:
        """Return the size of all masks."""
        return sum(map(len, self.masks)) + sum(len(mask) for each in self.ahead for mask in each.masks)


class Answers(WorkerMessage):
    """Answers of a batch, or a single late answer. Sequences of the batch that are missing still run."""

    number: int
    answers: list[SequenceAnswer]


# -- instances, processes and variables --------------------------------------------------------------------


class Create(WorkerMessage):
    """Make an instance. The module's compiled code is at `path`. With `first_pre`, D1b's first pre callback runs. With
    `keep_logs`, the guest's output is kept for its first answer, because D1's reply to an instantiation has no field
    for it."""

    rid: int
    key: int
    request: int
    path: str
    module: str
    facts: bytes
    argument: str
    prompt: list[int]
    first_pre: bool
    keep_logs: bool


class Created(WorkerMessage):
    rid: int
    error: str
    logs: str
    storage: list[WriteVar]
    micros: int
    prompt: list[int]
    pre: PreResult | None = None
    is_refused: bool = False  # the module cannot be instantiated
    is_unreadable: bool = False  # the compiled code is not for this machine, so it must be compiled again


class Drop(WorkerMessage):
    """Drop instances that will not be asked again, even if they run."""

    keys: list[int]
    reason: str


class ForkWorker(WorkerMessage, tag="Split"):
    """Fork this process. The child is branch `branch` and serves the files that come with the message: ring memory,
    doorbell, side socket, storage socket."""

    rid: int
    key: int
    new_key: int
    branch: int


class SplitDone(WorkerMessage):
    """The process was forked; a handle of the child comes with the message."""

    rid: int
    error: str
    pid: int = 0


class Variable(WorkerMessage):
    """A storage command of a guest in a separate process: a read, a write, or a request for only the version."""

    name: str
    write: WriteVar | None = None
    only_version: bool = False


class VariableReply(WorkerMessage):
    reply: bytes = b""
    error: str = ""
    version: int = 0


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
encode_into = _encoder.encode_into


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for one message type or a union of types."""
    return msgspec.msgpack.Decoder(kind)
