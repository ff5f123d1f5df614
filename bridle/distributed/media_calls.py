"""Encoding of media on a shard: the router sends the pixel values in parts, never features. An image is sent when
its features are needed and the shard does not hold them, so a chat that shows the same one in each turn sends it
once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.interfaces import MediaDevice
from bridle.engine.multimodal.multimodal_inputs import MediaArray, MultiModalItem
from bridle.errors import ProtocolError, UnsupportedFeature
from bridle.multimodal import MediaLimits

#: Names all pictures in a request to drop; no picture has this key.
EVERY_MEDIUM = b""
#: How many bytes of numbers a message carries.
PART_BYTES = 8 << 20
#: What the arrays of one picture may take: no request has more.
MAX_MEDIUM_BYTES = MediaLimits().max_array_bytes
_MAX_ARRAYS = 16
_ITEM_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8}


class CalledMedia:
    """Implements `bridle.engine.interfaces.MediaDevice` by calls. `encode` and `drop` carry out a request, in this
    or another process."""

    def __init__(
        self,
        row_bytes: int,
        max_bytes: int,
        encode: Callable[[Iterator[pb.MediumPart]], None],
        drop: Callable[[pb.DropMediumRequest], None],
    ) -> None:
        self.epoch = 0  # whoever reconnects adds one: what the other end had is gone
        self.row_bytes = row_bytes
        self.max_bytes = max_bytes
        self._encode = encode
        self._drop = drop

    def num_bytes(self, medium: MultiModalItem) -> int:
        return medium.num_rows * self.row_bytes

    def encode(self, medium: MultiModalItem) -> None:
        self._encode(parts_of(medium))

    def drop(self, key: bytes) -> None:
        self._drop(pb.DropMediumRequest(key=key))

    def clear(self) -> None:
        self._drop(pb.DropMediumRequest(key=EVERY_MEDIUM))


def find_media(executor: object) -> MediaDevice | None:
    """Return the encoder of `executor`, or None if its model reads only text."""
    found: MediaDevice | None = getattr(executor, "media", None)
    return found


def require_media(executor: object) -> MediaDevice:
    """Return the encoder of `executor`. Raises `UnsupportedFeature` if there is none."""
    device = find_media(executor)
    if device is None:
        raise UnsupportedFeature("this model is served for text only", "media")
    return device


def drop(device: MediaDevice, request: pb.DropMediumRequest) -> None:
    """Release the features of one image or of all, as the request says."""
    if request.key == EVERY_MEDIUM:
        device.clear()
    else:
        device.drop(request.key)


def parts_of(medium: MultiModalItem) -> Iterator[pb.MediumPart]:
    """An image as messages."""
    arrays = [pb.MediumArray(name=one.name, dtype=one.dtype, shape=one.shape) for one in medium.arrays]
    yield pb.MediumPart(head=pb.MediumHead(key=medium.key, num_rows=medium.num_rows, arrays=arrays))
    for array in medium.arrays:
        for start in range(0, len(array.data), PART_BYTES):
            yield pb.MediumPart(data=array.data[start : start + PART_BYTES])


class Assembly:
    """An image whose parts come one after the other. Raises `ProtocolError` for a part that does not fit."""

    def __init__(self, head: pb.MediumHead) -> None:
        self._head = head
        self._sizes = [_size(array) for array in head.arrays]
        self._data = bytearray()
        self._missing = sum(self._sizes)
        if not head.key or not 0 < len(self._sizes) <= _MAX_ARRAYS or self._missing > MAX_MEDIUM_BYTES:
            raise ProtocolError(
                f"an image with {len(head.key)} bytes of key came, with {len(self._sizes)} arrays of {self._missing} "
                f"bytes; at most {_MAX_ARRAYS} of {MAX_MEDIUM_BYTES}"
            )

    def add(self, data: bytes) -> bool:
        """Take in the next part; returns whether the image is whole."""
        if len(data) > self._missing:
            raise ProtocolError(f"{len(data)} bytes of an image came where {self._missing} are missing")
        self._data += data
        self._missing -= len(data)
        return not self._missing

    def medium(self) -> MultiModalItem:
        """The image, once it is whole."""
        if self._missing:
            raise ProtocolError(f"an image ended {self._missing} bytes early")
        view, start, arrays = memoryview(self._data), 0, []
        for array, size in zip(self._head.arrays, self._sizes, strict=True):
            data = bytes(view[start : start + size])
            arrays.append(MediaArray(array.name, array.dtype, tuple(array.shape), data))
            start += size
        return MultiModalItem(self._head.key, tuple(arrays), self._head.num_rows)


def assembled(parts: Iterable[pb.MediumPart]) -> MultiModalItem:
    """The image that the messages describe."""
    assembly: Assembly | None = None
    for part in parts:
        if part.HasField("head"):
            assembly = Assembly(part.head)
        elif assembly is None:
            raise ProtocolError("got a part of an image before its head")
        else:
            assembly.add(part.data)
    if assembly is None:
        raise ProtocolError("expected the first part of an image")
    return assembly.medium()


def _size(array: pb.MediumArray) -> int:
    if array.dtype not in _ITEM_BYTES:
        raise ProtocolError(f"an array of {array.dtype[:40]!r} came; known are {', '.join(_ITEM_BYTES)}")
    num_items: int = math.prod(array.shape)
    return _ITEM_BYTES[array.dtype] * num_items
