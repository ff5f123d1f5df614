"""Messages between the supervisor and its workers: msgpack arrays, over rings (steps) and sockets (all other messages).

`key` identifies an instance for its whole life, independently of the engine's sequence numbers. The messages are
internal: both processes always run the same version of bridle.
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
    """One op of a dialect-2 engine. `parent` is the key of the instance to fork, `branch` the number of the branch.
    `variables` are set first: names, and values in hexadecimal. `foreseen` is the number of tokens that clones have
    already seen as draft tokens. The draft tokens `ahead` are shown to clones after the guest's answer. `changes` are
    passed on to the guest."""

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
    """One sequence in a dialect-1 engine's `post_pre_process`. If `tokens` is None, the last step is not reported to
    the guest."""

    key: int
    seq_id: int
    tokens: list[int] | None
    backtrack: int


class Mid1(WorkerMessage):
    """One op of a dialect-1 engine's `mid_process`."""

    key: int
    seq_id: int
    group: list[int]
    parent: int | None = None
    branch: int = 0


class WorkerBatch(WorkerMessage, tag="Batch"):
    """All work of a worker in a step. `budget_ms` is the CPU time limit of one callback. `patience_ms` is the CPU time
    limit of all callbacks of an op together, after which the guest is ended."""

    number: int
    ops: list[Step2 | PostPre | Mid1]
    budget_ms: float
    patience_ms: float


class ChosenBranches(WorkerMessage, tag="Chosen"):
    """Dialect 2: the guest's branches. A branch's `sample_mask` is an index into the answer's `masks`. `turns` is how
    often in a row the guest was asked while it did nothing."""

    branches: list[BranchReply]
    turns: int = 1


class PhaseResults(WorkerMessage, tag="Phases"):
    """Dialect 1: results of the pre callback and of the post callback. `stop` is None if the post callback did not run.
    Logs and writes of the post callback are separate from the answer's."""

    stop: bool | None
    pre: PreResult
    post_logs: str = ""
    post_storage: list[WriteVar] = []
    post_micros: int = 0


class Sampled(WorkerMessage):
    """Dialect 1: the result of the mid callback. The answer always has a mask."""

    splice: MidResult | None


class LookaheadAnswer(WorkerMessage, tag="Foreseen"):
    """A clone's answer to a draft token: the fields of `ChosenBranches`, and the clone's log output."""

    token: int
    branches: list[BranchReply]
    masks: list[memoryview]
    logs: str = ""
    storage: list[WriteVar] = []


class SequenceAnswer(WorkerMessage, tag="Answer"):
    """The answer of one sequence. `failed_in_post` marks an error in dialect 1's post phase. `ahead` are the clones'
    answers to draft tokens."""

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
        """Return the size of all masks in bytes."""
        return sum(map(len, self.masks)) + sum(len(mask) for each in self.ahead for mask in each.masks)


class Answers(WorkerMessage):
    """Answers of a batch, or a single late answer. Sequences of the batch without an answer are still running."""

    number: int
    answers: list[SequenceAnswer]


# -- instances, processes and variables --------------------------------------------------------------------


class Create(WorkerMessage):
    """Create an instance. The module's compiled code is at `path`. `first_pre` runs the pre callback that dialect 1b
    has at instantiation. `keep_logs` keeps the guest's output for its first answer, because dialect 1 cannot report it
    at instantiation."""

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
    """Drop instances that will not be asked again, even if their callbacks still run."""

    keys: list[int]
    reason: str


class ForkWorker(WorkerMessage, tag="Split"):
    """Fork this process. The child is branch `branch` and uses the file descriptors that come with the message: ring
    memory, doorbell, side socket, storage socket."""

    rid: int
    key: int
    new_key: int
    branch: int


class SplitDone(WorkerMessage):
    """Report that the process was forked. A handle (pidfd) of the child comes with the message."""

    rid: int
    error: str
    pid: int = 0


class Variable(WorkerMessage):
    """A guest's access to a shared variable from its own process: a read, a write, or a request for the version
    only."""

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
