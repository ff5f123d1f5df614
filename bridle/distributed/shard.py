"""A shard: serves an executor over gRPC to one router at a time.

Steps run in the thread of the router's stream. Calls other than steps are answered by other threads, so that heartbeats
continue during a long step. A shard handles only tokens and masks, not requests, text or controllers.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from bridle import __version__
from bridle.distributed.adapter_calls import attempt, encode_layers, load, unload
from bridle.distributed.address import Tls, listen, make_server_options
from bridle.distributed.codec.control_vectors import find_vectors, forget_vectors
from bridle.distributed.media_calls import assembled, drop, find_media, require_media
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.session import ShardSession
from bridle.distributed.trace_context import StreamSpan, incoming_context
from bridle.engine.interfaces import Executor
from bridle.engine.warm_up import warm_up
from bridle.errors import BridleError, ProtocolError, ShardUnavailable
from bridle.lora import find_device
from bridle.threads import ThreadPerCall

_log = logging.getLogger(__name__)

PROTOCOL = 3
SERVICE = "bridle.shard.v1.Shard"
#: The metadata that a shard sends before its first reply, once it has accepted the router's stream.
ACCEPTED = ("bridle-accepted", "1")
#: Maximum number of calls in progress. Each has a thread that ends with the call; further calls are refused.
_MAX_CALLS = 64


class Shard:
    """The gRPC service for `executor`. `addresses` are the addresses of all shards of the model, by rank."""

    def __init__(
        self,
        executor: Executor,
        *,
        addresses: Sequence[str] = (),
        rank: int = 0,
        on_device_lost: Callable[[ShardUnavailable], None] = lambda error: None,
    ) -> None:
        self.executor = executor
        self.addresses = tuple(addresses)
        self.instance = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.num_steps = 0
        self._rank = rank
        self.on_device_lost = on_device_lost
        self.is_lost = False  # the device is lost, and this process will end
        self.taken = threading.Lock()
        self._encoding = threading.Lock()
        self._began: float | None = None  # start of the current request

    # -- the conversation with a router --------------------------------------------------------------------

    def steps(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Handle a router's stream of steps. While a router is connected, every other router is refused. After the loss
        of the device, all routers are refused."""
        if self.is_lost:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the shard has lost its device")
        if not self.taken.acquire(blocking=False):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the shard has a router; it serves one at a time")
        trace, num_before = incoming_context(context.invocation_metadata()), self.num_steps
        span = StreamSpan("shard steps", {"bridle.shard.rank": self._rank}, trace)
        try:
            self.executor.reset()
            self._forget_uploads()
            _log.info("a router connected%s", f", traceparent {trace['traceparent']}" if trace else "")
            context.send_initial_metadata((ACCEPTED,))
            yield from self._answer(requests, context)
        finally:
            self._began = None
            self.executor.reset()
            span.end(num_steps=self.num_steps - num_before)
            self.taken.release()
            _log.info("the router has disconnected after step %d", self.num_steps)

    def _answer(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        session, num_before = ShardSession(self.executor, self._lose), self.num_steps
        try:
            for data in requests:
                self._began = time.monotonic()
                reply = session.handle(data)
                self._began = None
                self.num_steps = num_before + session.num_steps
                if reply is not None:
                    yield reply
        except ProtocolError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _lose(self, error: ShardUnavailable) -> None:
        self.is_lost = True
        self.on_device_lost(error)

    # -- questions -----------------------------------------------------------------------------------------

    def discover(self, request: pb.DiscoverRequest, context: grpc.ServicerContext) -> pb.DiscoverReply:
        return pb.DiscoverReply(addresses=self.addresses)

    def info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoReply:
        info, media, vectors = self.executor.info, find_media(self.executor), find_vectors(self.executor)
        return pb.InfoReply(
            protocol=PROTOCOL,
            version=__version__,
            instance=self.instance,
            pid=os.getpid(),
            rank=self._rank,
            num_ranks=max(len(self.addresses), 1),
            num_bytes=getattr(self.executor, "num_bytes", 0),
            media_row_bytes=getattr(media, "row_bytes", 0),
            media_max_bytes=0 if media is None else media.max_bytes,
            adapter_layers=encode_layers(self.executor),
            num_layers=getattr(vectors, "num_layers", 0),
            hidden_size=getattr(vectors, "hidden_size", 0),
            unnamed=info.unnamed.bounds,
            **{name: getattr(info, name) for name in info.__slots__ if name != "unnamed"},
        )

    def health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthReply:
        began = self._began
        return pb.HealthReply(
            instance=self.instance,
            num_steps=self.num_steps,
            is_taken=self.taken.locked(),
            step_seconds=0.0 if began is None else time.monotonic() - began,
        )

    def warm_up(self, request: pb.WarmUpRequest, context: grpc.ServicerContext) -> pb.WarmUpReply:
        """Run the largest possible step. Refused while a router is connected, because the step would erase the router's
        sequences."""
        if not self.taken.acquire(blocking=False):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a router is connected; warm up before that")
        try:
            found = warm_up(self.executor, request.num_tokens, request.num_seqs)
        except BridleError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the largest step fails: {error}")
        finally:
            self.taken.release()
        return pb.WarmUpReply(
            num_tokens=found.num_tokens,
            seconds=found.seconds,
            num_seqs=found.num_seqs,
            decode_seconds=found.decode_seconds,
        )

    # -- adapters, in parallel to the steps ------------------------------------------------------------------------

    def load_adapter(self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext) -> pb.LoadAdapterReply:
        return pb.LoadAdapterReply(failure=attempt(lambda: load(self.executor, request)))

    def unload_adapter(self, request: pb.UnloadAdapterRequest, context: grpc.ServicerContext) -> pb.UnloadAdapterReply:
        return pb.UnloadAdapterReply(failure=attempt(lambda: unload(self.executor, request)))

    # -- pictures, in parallel to the steps ------------------------------------------------------------------------

    def encode_medium(self, parts: Iterator[pb.MediumPart], context: grpc.ServicerContext) -> pb.EncodeMediumReply:
        """Compute the features of an image. Only one call at a time has an image in memory; other calls wait before
        they receive their images."""
        with self._encoding:
            return pb.EncodeMediumReply(failure=attempt(lambda: require_media(self.executor).encode(assembled(parts))))

    def drop_medium(self, request: pb.DropMediumRequest, context: grpc.ServicerContext) -> pb.DropMediumReply:
        return pb.DropMediumReply(failure=attempt(lambda: drop(require_media(self.executor), request)))

    def _forget_uploads(self) -> None:
        """Drop all adapters, images and control vectors, because a new router sends its own."""
        forget_vectors(self.executor)
        for device in (find_device(self.executor), find_media(self.executor)):
            if device is not None:
                device.clear()


def start_shard(shard: Shard, address: str, tls: Tls | None = None) -> tuple[grpc.Server, str]:
    """Start to serve on `address`. Returns the server, and the address with the actual port. Raises `InvalidRequest` if
    the address cannot be used."""
    threads = ThreadPerCall("bridle-shard")
    server = grpc.server(threads, options=make_server_options(), maximum_concurrent_rpcs=_MAX_CALLS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _handlers(shard)),))
    bound = listen(server, address, tls)
    shard.addresses = shard.addresses or (bound,)
    server.start()
    return server, bound


def _handlers(shard: Shard) -> dict[str, Any]:
    unary: dict[str, tuple[Any, Any]] = {
        "Discover": (shard.discover, pb.DiscoverRequest),
        "Info": (shard.info, pb.InfoRequest),
        "Health": (shard.health, pb.HealthRequest),
        "WarmUp": (shard.warm_up, pb.WarmUpRequest),
        "LoadAdapter": (shard.load_adapter, pb.LoadAdapterRequest),
        "UnloadAdapter": (shard.unload_adapter, pb.UnloadAdapterRequest),
        "DropMedium": (shard.drop_medium, pb.DropMediumRequest),
    }
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(function, request.FromString, _serialize)
        for name, (function, request) in unary.items()
    }
    handlers["EncodeMedium"] = grpc.stream_unary_rpc_method_handler(
        shard.encode_medium, pb.MediumPart.FromString, _serialize
    )
    handlers["Steps"] = grpc.stream_stream_rpc_method_handler(shard.steps)  # bytes: parsed in the stream's own thread
    return handlers


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()  # type: ignore[no-any-return]
