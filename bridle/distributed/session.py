"""The shard's end of a stream of steps: handles requests and returns replies, one after the other. This module uses no
sockets.

An error of the executor never ends the stream. An error in a forward pass is reported in the reply to its sample batch.
So each sample batch, and each request for embeddings, has exactly one reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from bridle.distributed.codec.control_vectors import forget_vectors, receive_vector
from bridle.distributed.codec.embeddings import answer_embed
from bridle.distributed.codec.errors import encode_failure
from bridle.distributed.codec.sample_batch import decode_batch
from bridle.distributed.codec.sampling_params import SamplingSlots
from bridle.distributed.codec.step_plan import decode_plan
from bridle.distributed.codec.step_result import encode_result
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.interfaces import Executor
from bridle.errors import BridleError, ProtocolError, ShardUnavailable

_log = logging.getLogger(__name__)


class ShardSession:
    """The connection with one router. `on_device_lost` is called when the executor reports that its device is lost.
    `num_steps` counts the answered sample batches."""

    def __init__(self, executor: Executor, on_device_lost: Callable[[ShardUnavailable], None]) -> None:
        self._executor = executor
        self._on_device_lost = on_device_lost
        self.num_steps = 0
        self._slots = SamplingSlots()
        self._fault: Exception | None = None  # of the last forward pass

    def handle(self, data: bytes) -> bytes | None:
        """Handle a request. Returns the reply, or None if the request has no reply. Raises `ProtocolError` if `data` is
        not a request."""
        try:
            request = pb.StepRequest.FromString(data)
        except DecodeError as error:
            raise ProtocolError(f"{len(data)} bytes from the router are not a valid step request: {error}") from error
        match request.WhichOneof("kind"):
            case "plan":
                self._forward(request.plan)
            case "batch":
                self.num_steps += 1
                return self._reply(request.batch.step, lambda: self._sample(request.batch))
            case "embed":
                return self._reply(request.embed.step, lambda: self._embed(request.embed))
            case "control_vector":
                receive_vector(self._executor, request.control_vector)
            case "reset":
                self._fault = None
                self._executor.reset()
                forget_vectors(self._executor)
            case kind:
                raise ProtocolError(
                    f"got a step request of kind {kind}, which this shard does not know; it speaks an older protocol "
                    "than the router"
                )
        return None

    def _forward(self, message: pb.Plan) -> None:
        self._fault = None
        try:
            self._executor.forward(decode_plan(message))
        except Exception as error:
            self._fault = self._seen(error)

    def _sample(self, message: pb.Batch) -> pb.StepReply:
        batch = decode_batch(message, self._slots)
        return pb.StepReply(result=encode_result(self._executor.sample(batch)))

    def _embed(self, message: pb.Embed) -> pb.StepReply:
        return pb.StepReply(vectors=answer_embed(self._executor, message))

    def _reply(self, step: int, answer: Callable[[], pb.StepReply]) -> bytes:
        try:
            if self._fault is not None:
                raise self._fault
            reply = answer()
        except Exception as error:
            reply = pb.StepReply(failure=encode_failure(step, self._seen(error)))
        return reply.SerializeToString()  # type: ignore[no-any-return]

    def _seen(self, error: Exception) -> Exception:
        if error is self._fault:
            return error
        if isinstance(error, ShardUnavailable):
            self._on_device_lost(error)
        elif not isinstance(error, BridleError):
            _log.exception("a step failed", exc_info=error)
        return error
