"""The engine's executor for a model in another process: sends steps to a shard over a stream, and reconnects.

The plan is sent first, masks follow while the forward pass runs, and only tokens and log-probabilities are returned. If
the shard is lost, the KV of every sequence is lost. After a loss, the engine preempts all sequences. A thread tries to
reconnect until the shard is back. This module does not start shards.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from bridle.control_vectors import ControlVectors
from bridle.distributed.adapter_calls import CalledDevice
from bridle.distributed.address import Tls
from bridle.distributed.codec.control_vectors import SentVectors
from bridle.distributed.codec.embeddings import MAX_NUMBERS, decode_vectors
from bridle.distributed.codec.errors import decode_failure
from bridle.distributed.codec.sample_batch import encode_batch
from bridle.distributed.codec.sampling_params import SamplingNames
from bridle.distributed.codec.step_plan import encode_plan
from bridle.distributed.codec.step_result import check_result, decode_result
from bridle.distributed.link import ShardLink, Timings
from bridle.distributed.media_calls import CalledMedia
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.step_time_estimator import StepTimeEstimator
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.errors import BridleError, InternalError, ProtocolError, ShardUnavailable

_log = logging.getLogger(__name__)

#: Pauses between attempts to reach a shard again, in seconds; the last one repeats.
_PAUSES = (0.02, 0.05, 0.1, 0.2)


class ShardExecutor:
    """Implements `Executor`, `SupportsReconnect` and `Embedder` over a shard at `address`.

    The constructor waits up to `start_timeout` seconds for the shard, as long as `is_starting` returns True.
    `on_loss(pid, reason)` is called from a separate thread when the shard is lost, and may end its process. `on_loss`
    is called again, with None as the pid, whenever no shard was found for another `start_timeout` seconds.
    `on_proven(pid)` is called when a shard has computed its first step.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        timings: Timings | None = None,
        start_timeout: float = 60.0,
        is_starting: Callable[[], bool] = lambda: True,
        on_loss: Callable[[int | None, str], None] = lambda pid, reason: None,
        on_proven: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self.address = address
        self.on_change: Callable[[], None] = lambda: None
        self.num_losses = 0
        self._tls = tls
        self._timings = timings or Timings()
        self._start_timeout = start_timeout
        self._on_loss = on_loss
        self._on_proven = on_proven
        self._proven: ShardLink | None = None
        self._why = ""  # reason why the shard is unreachable
        self._closed = threading.Event()
        self._pace = StepTimeEstimator(self._timings.least_step, self._timings.first_step)
        self._names = SamplingNames()
        self.used: ShardLink | None = None  # the link whose shard has the current KV
        self._plan: tuple[int, int, float] = (-1, 0, 0.0)  # the last plan: step, number of tokens, time of sending
        self.link: ShardLink | None = self._first_link(start_timeout, is_starting)
        self.info, self.num_bytes = self.link.info, self.link.num_bytes
        self.adapters = CalledDevice(
            self.link.adapter_layers,
            lambda request: self._reachable().load_adapter(request),
            lambda request: self._reachable().unload_adapter(request),
        )
        self.media = self._called_media(self.link)
        num_layers, hidden_size = self.link.num_layers, self.link.hidden_size
        self.control_vectors = ControlVectors(num_layers, hidden_size) if num_layers else None
        self._sent = SentVectors(self.control_vectors)
        self._keeper = threading.Thread(target=self._keep, name="bridle-shard-watch", daemon=True)
        self._keeper.start()

    def _called_media(self, link: ShardLink) -> CalledMedia | None:
        """Return the media encoder, or None if the model reads only text."""
        if not link.media_row_bytes:
            return None
        return CalledMedia(
            link.media_row_bytes,
            link.media_max_bytes,
            lambda parts: self._reachable().encode_medium(parts),
            lambda request: self._reachable().drop_medium(request),
        )

    # -- the engine's thread -------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Return whether a shard seems to be connected. Safe from any thread."""
        link = self.link
        return link is not None and not link.is_lost

    def forward(self, plan: StepPlan) -> None:
        """Send the plan without waiting. Raises `ShardUnavailable`; all other errors of the plan are raised by
        `sample`."""
        link = self._reachable()
        if self.used not in (None, link):
            raise ShardUnavailable(
                f"the connection to the shard at {self.address} was lost; another shard process runs there now"
            )
        if self.used is None:
            self.used, self._names, self._sent = link, SamplingNames(), SentVectors(self.control_vectors)
        for message in self._sent.messages(plan):
            link.send(message)
        self._plan = plan.step, plan.num_tokens, time.monotonic()
        link.send(pb.StepRequest(plan=encode_plan(plan)))

    def sample(self, batch: SampleBatch) -> StepResult:
        """Send the sample batch and wait for the sampled tokens. Raises the shard's error, or `ShardUnavailable`."""
        link = self.used
        if link is None:
            raise InternalError(f"step {batch.step} samples tokens, but had no forward pass")
        step, num_tokens, began = self._plan
        reply = self._ask(link, batch.step, pb.StepRequest(batch=encode_batch(batch, self._names)), "result")
        if step == batch.step:
            self._pace.note(num_tokens, time.monotonic() - began)
        if self._proven is not link:
            self._proven = link
            self._on_proven(link.pid)
        return check_result(decode_result(reply.result), batch, self.info.vocab_size)

    def embed(self, step: int, logits_rows: Sequence[int]) -> list[array[float]]:
        """Request the embedding vectors of these rows of the plan, in portions that fit a message. Raises the shard's
        error, or `ShardUnavailable`."""
        link, size = self.used, self.info.embedding_size
        if link is None:
            raise InternalError(f"step {step} asks for embeddings, but had no forward pass")
        most = max(MAX_NUMBERS // max(size, 1), 1)
        vectors: list[array[float]] = []
        for at in range(0, len(logits_rows), most):
            rows = logits_rows[at : at + most]
            reply = self._ask(link, step, pb.StepRequest(embed=pb.Embed(step=step, logits_rows=rows)), "vectors")
            vectors += decode_vectors(reply.vectors, len(rows), size)
        return vectors

    def _ask(self, link: ShardLink, step: int, request: pb.StepRequest, kind: str) -> pb.StepReply:
        """Send a request and wait for its reply, which must be of this `kind`. Replies to earlier steps are dropped,
        because the engine no longer waits for such replies."""
        link.expect(step, self._pace.limit(self._plan[1]))
        link.send(request)
        while True:
            reply = link.receive()
            found = reply.WhichOneof("kind")
            if found is None:
                raise ProtocolError(f"the shard answered step {step} with an empty reply")
            if getattr(reply, found).step < step:
                continue
            if found == "failure":
                error = decode_failure(reply.failure)
                if isinstance(error, ShardUnavailable):
                    link.cut(str(error))  # it would fail each further step as well, and each would count as a loss
                raise error
            if found != kind:
                raise ProtocolError(f"the shard answered step {step} with {found} instead of {kind}")
            return reply

    def reset(self) -> None:
        """Forget the adapters and KV of the last shard. The next plan may go to another shard."""
        link, self.used = self.used, None
        if link is not None and not link.is_lost:
            link.send(pb.StepRequest(reset=pb.Reset()))

    # -- any thread ----------------------------------------------------------------------------------------

    def _reachable(self) -> ShardLink:
        link = self.link
        if link is None or link.is_lost:
            raise ShardUnavailable(
                f"the shard at {self.address} is not connected: {self._why or 'the connection was lost'}"
            )
        return link

    def close(self) -> None:
        """Disconnect from the shard. Idempotent."""
        self._closed.set()
        link = self.link
        if link is not None:
            link.leave()
        self._keeper.join()

    # -- the keeper's thread -------------------------------------------------------------------------------

    def _first_link(self, timeout: float, is_starting: Callable[[], bool]) -> ShardLink:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return ShardLink(self.address, self._tls, self._timings)
            except ShardUnavailable:
                if not is_starting() or time.monotonic() > deadline:
                    raise
            self._closed.wait(_PAUSES[1])

    def _keep(self) -> None:
        """Watch the link, and find the next one when it is lost, until closed."""
        while not self._closed.is_set():
            link = self.link
            if link is None:
                self._find()
                continue
            link.watch()
            self.link, self._why = None, link.reason
            link.close()
            if not self._closed.is_set():
                self.num_losses += 1
                _log.error("the connection to the shard at %s is lost: %s", self.address, link.reason)
                self._tell(lambda link=link: self._on_loss(link.pid, link.reason))  # type: ignore[misc]
                self._tell(self.on_change)
        if self.link is not None:
            self.link.close()

    def _find(self) -> None:
        """Try to connect to the shard until it answers or this executor is closed."""
        attempt, began = 0, time.monotonic()
        patience = self._start_timeout or math.inf
        while not self._closed.wait(_PAUSES[min(attempt, len(_PAUSES) - 1)]):
            attempt += 1
            if time.monotonic() - began > patience:
                patience += self._start_timeout
                self._give_up(time.monotonic() - began)
            try:
                link = ShardLink(self.address, self._tls, self._timings)
            except ShardUnavailable:
                continue
            except Exception as error:  # this thread must continue to try after any error
                self._note_unusable(str(error) if isinstance(error, BridleError) else repr(error))
                continue
            if not can_replace(link.info, self.info):
                self._note_unusable(f"it is another one now: {link.info} instead of {self.info}")
                link.close()
                continue
            self.adapters.epoch += 1
            if self.media is not None:
                self.media.epoch += 1
            self.link = link
            _log.info("the shard at %s is connected again after %.1f s", self.address, time.monotonic() - began)
            self._tell(self.on_change)
            return

    def _note_unusable(self, why: str) -> None:
        if why != self._why:
            _log.error("the shard at %s cannot be used: %s", self.address, why)
        self._why = why

    def _give_up(self, seconds: float) -> None:
        """Call `on_loss`, so that the executor's owner can end a shard process that hangs while it starts."""
        reason = f"it has not come back for {seconds:.0f} s"
        _log.error("the shard at %s is still unreachable: %s", self.address, reason)
        self._tell(lambda: self._on_loss(None, reason))

    def _tell(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            _log.exception("a callback after the lost connection to the shard failed")


def can_replace(new: ExecutorInfo, old: ExecutorInfo) -> bool:
    """Return whether `new` can compute plans made for `old`: it has the same model and no fewer blocks."""
    has_room = new.num_blocks >= old.num_blocks and new.max_model_len >= old.max_model_len
    return has_room and is_same_model(new, old)


def is_same_model(one: ExecutorInfo, other: ExecutorInfo) -> bool:
    """Return whether two shards have the same model; their capacity may differ."""
    return other == replace(one, num_blocks=other.num_blocks, max_model_len=other.max_model_len)
