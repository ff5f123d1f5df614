"""One connection to a shard, from its first answer to its loss. A lost link is not reused; each attempt to reconnect
creates a new link.

The engine's thread sends and receives. A second thread runs `watch`: it requests heartbeats from the shard. The second
thread cuts the link if no heartbeat comes or if a step takes too long. Cutting the link wakes the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, get_args

import grpc

from bridle.distributed.adapter_calls import check, decode_layers
from bridle.distributed.address import MAX_MESSAGE_BYTES, Tls, open_channel
from bridle.distributed.codec.sample_batch import read_unnamed
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.shard import ACCEPTED, PROTOCOL, SERVICE
from bridle.distributed.stall_detector import HELD_UP_SECONDS, is_held_up
from bridle.distributed.trace_context import StreamSpan
from bridle.engine.interfaces import ExecutorInfo, Task
from bridle.errors import InternalError, ProtocolError, ShardUnavailable

_log = logging.getLogger(__name__)

#: Time limits for reading an adapter and for encoding an image, in seconds. A hung shard is detected much earlier.
_ADAPTER_SECONDS, _MEDIUM_SECONDS = 300.0, 1800.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Time limits of a link, in seconds.

    A heartbeat is requested every `beat` seconds. A shard counts as hung after `max_missed` heartbeats in a row that
    took longer than `patience`. If the shard waits for a busy machine, it counts as hung only after `held_up`.
    `connect` limits one attempt to connect. `least_step` is the minimum time limit of a step. `first_step` is the limit
    before any step was measured.
    """

    beat: float = 0.25
    patience: float = 0.5
    max_missed: int = 2
    held_up: float = HELD_UP_SECONDS
    connect: float = 10.0
    least_step: float = 15.0
    first_step: float = 300.0


class ShardLink:
    """A connection to a shard. The constructor raises `ShardUnavailable` if no shard answers, and `ProtocolError` if
    the peer is no shard with this protocol version."""

    def __init__(self, address: str, tls: Tls | None, timings: Timings) -> None:
        self.address = address
        self.reason = ""  # reason of the loss
        self._is_closing = False
        self._timings = timings
        self._ended = threading.Event()
        self._step: tuple[int, float, float] | None = None  # the current step: number, time limit, deadline
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._span: StreamSpan | None = None
        self._channel = open_channel(address, tls)
        try:
            reply = self._ask("Info", pb.InfoRequest(), pb.InfoReply, timings.connect)
            self.info, self.num_bytes, self.pid = read_info(reply)
            self.adapter_layers = decode_layers(reply)
            self.media_row_bytes, self.media_max_bytes = reply.media_row_bytes, reply.media_max_bytes
            self.num_layers, self.hidden_size = reply.num_layers, reply.hidden_size
            self._call = self._open()
        except BaseException as error:
            self._end_span(str(error))
            self._channel.close()
            raise

    def _open(self) -> Any:
        """Open the stream for steps. Returns the stream when the shard has accepted it."""
        self._span = StreamSpan("shard stream", {"server.address": self.address, "bridle.shard.pid": self.pid})
        call = self._channel.stream_stream(f"/{SERVICE}/Steps")(
            iter(self._outbox.get, None), metadata=self._span.metadata
        )
        timer = threading.Timer(self._timings.connect, call.cancel)
        timer.start()
        # A refusal has metadata too, and its status may arrive later than the metadata. So only the shard's own entry
        # counts as acceptance.
        is_accepted = ACCEPTED in call.initial_metadata()
        timer.cancel()
        if not is_accepted:
            self._outbox.put(None)
            raise ShardUnavailable(f"the shard at {self.address} refuses the router: {call.details()}")
        if not call.add_callback(self._ended.set):
            self._ended.set()
        return call

    def _ask(self, method: str, request: Any, reply: Any, timeout: float) -> Any:
        ask = self._channel.unary_unary(f"/{SERVICE}/{method}", type(request).SerializeToString, reply.FromString)
        return self._answer(ask, request, timeout)

    def _answer(self, ask: Callable[..., Any], request: Any, timeout: float) -> Any:
        try:
            return ask(request, timeout=timeout)
        except grpc.RpcError as error:
            raise ShardUnavailable(f"no answer from the shard at {self.address}: {_details(error)}") from None

    # -- the engine's thread -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._ended.is_set()

    def send(self, request: pb.StepRequest) -> None:
        """Send a request without waiting. A message over the size limit is refused here, so that only its step
        fails."""
        data = request.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            raise InternalError(
                f"the message of a step to the shard has {len(data)} bytes; at most {MAX_MESSAGE_BYTES}"
            )
        self._outbox.put(data)

    def load_adapter(self, request: pb.LoadAdapterRequest) -> None:
        """Make the shard read or place an adapter, and wait until that is done. Safe from any thread."""
        check(self._ask("LoadAdapter", request, pb.LoadAdapterReply, _ADAPTER_SECONDS))

    def unload_adapter(self, request: pb.UnloadAdapterRequest) -> None:
        """Make the shard release an adapter. Safe from any thread."""
        check(self._ask("UnloadAdapter", request, pb.UnloadAdapterReply, _ADAPTER_SECONDS))

    def encode_medium(self, parts: Iterator[pb.MediumPart]) -> None:
        """Make the shard encode an image, and wait until that is done. Safe from any thread."""
        method = f"/{SERVICE}/EncodeMedium"
        ask = self._channel.stream_unary(method, pb.MediumPart.SerializeToString, pb.EncodeMediumReply.FromString)
        check(self._answer(ask, parts, _MEDIUM_SECONDS))

    def drop_medium(self, request: pb.DropMediumRequest) -> None:
        """Make the shard release the features of an image. Safe from any thread."""
        check(self._ask("DropMedium", request, pb.DropMediumReply, _MEDIUM_SECONDS))

    def expect(self, step: int, seconds: float) -> None:
        """Record that the reply to `step` is due within `seconds`; `watch` cuts the link if it is late."""
        self._step = step, seconds, time.monotonic() + seconds

    def receive(self) -> pb.StepReply:
        """Wait for the next reply. Raises `ShardUnavailable` once the link is lost."""
        try:
            data = next(self._call)
        except (grpc.RpcError, StopIteration) as error:
            self.cut(f"the stream ended: {_details(error)}")
            raise ShardUnavailable(f"the connection to the shard at {self.address} is lost: {self.reason}") from None
        self._step = None
        reply: pb.StepReply = pb.StepReply.FromString(data)
        return reply

    # -- watching ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Request heartbeats until the link is lost."""
        num_missed = 0
        while not self._ended.wait(self._timings.beat):
            if self._step is not None and time.monotonic() > self._step[2]:
                step, seconds, _ = self._step
                self.cut(f"step {step} took longer than {seconds:.1f} s")
            try:
                self._ask("Health", pb.HealthRequest(), pb.HealthReply, self._timings.patience)
                num_missed = 0
            except ShardUnavailable:
                num_missed += 1
            silence = num_missed * self._timings.patience
            if num_missed >= self._timings.max_missed and (silence > self._timings.held_up or not self._is_held_up()):
                self.cut(f"no sign of life for {silence:g} s")
        if not self.reason:
            self.cut(f"the stream ended: {_details(self._call)}")

    def _is_held_up(self) -> bool:
        """Return whether the shard is a local process that is late because the machine is busy."""
        return self.address.startswith("unix:") and is_held_up(self.pid)

    def cut(self, reason: str) -> None:
        """Mark the link as lost. The first reason given is reported. Safe from any thread."""
        self.reason = self.reason or reason
        self._end_span("" if self._is_closing else self.reason)
        self._call.cancel()
        self._outbox.put(None)
        self._ended.set()

    def leave(self) -> None:
        """End the stream of requests to the shard. Safe from any thread."""
        self._is_closing = True
        self.cut("the router is done with it")

    def _end_span(self, failure: str) -> None:
        if self._span is not None:
            self._span.end(failure)

    def close(self) -> None:
        """Close the connection and free its resources. Idempotent."""
        self.leave()
        self._channel.close()


def read_info(reply: pb.InfoReply) -> tuple[ExecutorInfo, int, int]:
    """Decode a shard's description of itself: the model, the model's memory in bytes, and the shard's process id."""
    if reply.protocol != PROTOCOL:
        raise ProtocolError(
            f"the shard speaks protocol {reply.protocol} (bridle {reply.version}); this router speaks protocol "
            f"{PROTOCOL}"
        )
    if reply.kv not in ("paged", "sequences"):
        raise ProtocolError(f"the shard has a KV cache of kind {reply.kv!r}; must be 'paged' or 'sequences'")
    fields: dict[str, Any] = {name: getattr(reply, name) for name in ExecutorInfo.__slots__}
    fields["eos_token_ids"] = tuple(reply.eos_token_ids)
    fields["unnamed"] = read_unnamed(reply.unnamed, "the shard's description")
    fields["task"] = reply.task or "generate"
    if fields["task"] not in get_args(Task):
        raise ProtocolError(
            f"the shard's model has the task {reply.task[:100]!r}; must be one of {', '.join(get_args(Task))}"
        )
    return ExecutorInfo(**fields), reply.num_bytes, reply.pid


def _details(error: Any) -> str:
    details: Callable[[], str | None] | None = getattr(error, "details", None)
    return (details and details()) or "the shard closed it"
