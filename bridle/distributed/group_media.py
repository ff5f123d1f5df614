"""Encodes images in a group of ranks. Each rank has the whole vision encoder, and encodes the images that rank 0 passes
on.

All ranks except rank 0 encode in parallel to steps, in the order of rank 0's requests. Rank 0's plans name only images
that rank 0 has encoded. So an error in another rank means that the ranks differ.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from bridle.distributed.media_calls import Assembly, drop, find_media, parts_of
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.interfaces import Executor, MediaDevice
from bridle.engine.multimodal.multimodal_inputs import MultiModalItem
from bridle.errors import ProtocolError, ShardUnavailable


class GroupMedia:
    """Implements `MediaDevice` on rank 0: sends each request to the other ranks, then encodes with `device`."""

    def __init__(self, device: MediaDevice, broadcast: Callable[[pb.StepRequest], None]) -> None:
        self._device = device
        self._broadcast = broadcast
        self.epoch = device.epoch
        self.max_bytes = device.max_bytes
        self.row_bytes: int = getattr(device, "row_bytes", 0)

    def num_bytes(self, medium: MultiModalItem) -> int:
        return self._device.num_bytes(medium)

    def encode(self, medium: MultiModalItem) -> None:
        for part in parts_of(medium):
            self._tell(pb.StepRequest(medium_part=part))
        try:
            self._device.encode(medium)
        except BaseException:
            self._tell(pb.StepRequest(drop_medium=pb.DropMediumRequest(key=medium.key)))
            raise
        self._tell(pb.StepRequest(medium_ready=medium.key))

    def drop(self, key: bytes) -> None:
        self._device.drop(key)
        self._tell(pb.StepRequest(drop_medium=pb.DropMediumRequest(key=key)))

    def clear(self) -> None:
        self._device.clear()
        self._tell(pb.StepRequest(drop_medium=pb.DropMediumRequest()))

    def _tell(self, request: pb.StepRequest) -> None:
        try:
            self._broadcast(request)
        except OSError as error:  # the group is about to end
            raise ShardUnavailable(f"a rank of the tensor-parallel group has ended: {error}") from error


class MemberMedia:
    """Encodes images in a separate thread. Steps continue meanwhile. If a plan names an image, its step waits until
    this rank has encoded the image."""

    def __init__(self, executor: Executor) -> None:
        self._device = find_media(executor)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="bridle-media")
        self._assembly: tuple[bytes, Assembly] | None = None
        self._encoding: dict[bytes, Future[None]] = {}

    def handle(self, request: pb.StepRequest) -> bool:
        """Handle the request if it is about images. Returns whether the request is about images. Raises an error if
        this rank cannot encode an image that rank 0 could encode."""
        match request.WhichOneof("kind"):
            case "medium_part":
                self._take(request.medium_part)
            case "medium_ready":
                self._await(request.medium_ready)
            case "drop_medium":
                self._drop(request.drop_medium)
            case _:
                return False
        return True

    def _take(self, part: pb.MediumPart) -> None:
        if part.HasField("head"):
            self._assembly = part.head.key, Assembly(part.head)
            return
        if self._assembly is None:
            raise ProtocolError("got data of an image before the message that begins the image")
        key, assembly = self._assembly
        if assembly.add(part.data):
            self._assembly = None
            self._encoding[key] = self.thread.submit(self._require().encode, assembly.medium())

    def _await(self, key: bytes) -> None:
        if key not in self._encoding:
            raise ProtocolError(f"image {key.hex()} is needed now, but was not received")
        self._encoding.pop(key).result()

    def _drop(self, request: pb.DropMediumRequest) -> None:
        self._encoding.pop(request.key, None)
        self.thread.submit(drop, self._require(), request)

    def _require(self) -> MediaDevice:
        if self._device is None:
            raise ProtocolError("got an image for a rank with a text-only model")
        return self._device
