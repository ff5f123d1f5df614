"""Calls with which a router lets a shard encode images. The router sends pixel values in parts. An image is sent when
the model needs its features and the shard does not have them. So a chat with the same image in each turn sends the
image once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.interfaces import MediaDevice
from bridle.engine.multimodal.multimodal_inputs import MediaArray, MultiModalItem
from bridle.errors import ProtocolError, UnsupportedFeature
from bridle.multimodal import MediaLimits

#: Stands for all images in a request to drop; no image has this key.
EVERY_MEDIUM = b""
#: Bytes of pixel values in one message.
PART_BYTES = 8 << 20
#: Maximum bytes of one image's arrays; a request is limited to the same number.
MAX_MEDIUM_BYTES = MediaLimits().max_array_bytes
_MAX_ARRAYS = 16
_ITEM_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8}


class CalledMedia:
    """Implements `bridle.engine.interfaces.MediaDevice` by messages. The functions `encode` and `drop` execute a
    message, in this process or another one."""

    def __init__(
        self,
        row_bytes: int,
        max_bytes: int,
        encode: Callable[[Iterator[pb.MediumPart]], None],
        drop: Callable[[pb.DropMediumRequest], None],
    ) -> None:
        self.epoch = 0  # incremented after each reconnection, because the other process has lost its features
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
    """Return the encoder of `executor`. Raises `UnsupportedFeature` if the executor's model reads only text."""
    device = find_media(executor)
    if device is None:
        raise UnsupportedFeature("this model is served for text only", "media")
    return device


def drop(device: MediaDevice, request: pb.DropMediumRequest) -> None:
    """Release the features of a message's image, or of all images."""
    if request.key == EVERY_MEDIUM:
        device.clear()
    else:
        device.drop(request.key)


def parts_of(medium: MultiModalItem) -> Iterator[pb.MediumPart]:
    """Yield the messages that carry an image."""
    arrays = [pb.MediumArray(name=one.name, dtype=one.dtype, shape=one.shape) for one in medium.arrays]
    yield pb.MediumPart(head=pb.MediumHead(key=medium.key, num_rows=medium.num_rows, arrays=arrays))
    for array in medium.arrays:
        for start in range(0, len(array.data), PART_BYTES):
            yield pb.MediumPart(data=array.data[start : start + PART_BYTES])


class Assembly:
    """Assembles an image from parts that arrive one after the other. Raises `ProtocolError` for an invalid part."""

    def __init__(self, head: pb.MediumHead) -> None:
        self._head = head
        self._sizes = [_size(array) for array in head.arrays]
        self._data = bytearray()
        self._missing = sum(self._sizes)
        if not head.key or not 0 < len(self._sizes) <= _MAX_ARRAYS or self._missing > MAX_MEDIUM_BYTES:
            raise ProtocolError(
                f"an image has a key of {len(head.key)} bytes, and {len(self._sizes)} arrays of {self._missing} "
                f"bytes in all; it must have a key, and 1 to {_MAX_ARRAYS} arrays of at most {MAX_MEDIUM_BYTES} bytes"
            )

    def add(self, data: bytes) -> bool:
        """Add the next part of the image. Returns whether the image is complete."""
        if len(data) > self._missing:
            raise ProtocolError(f"got {len(data)} bytes of an image that lacks only {self._missing} bytes")
        self._data += data
        self._missing -= len(data)
        return not self._missing

    def medium(self) -> MultiModalItem:
        """Return the complete image."""
        if self._missing:
            raise ProtocolError(f"an image ended, but {self._missing} bytes of it are missing")
        view, start, arrays = memoryview(self._data), 0, []
        for array, size in zip(self._head.arrays, self._sizes, strict=True):
            data = bytes(view[start : start + size])
            arrays.append(MediaArray(array.name, array.dtype, tuple(array.shape), data))
            start += size
        return MultiModalItem(self._head.key, tuple(arrays), self._head.num_rows)


def assembled(parts: Iterable[pb.MediumPart]) -> MultiModalItem:
    """Return the image that the messages carry."""
    assembly: Assembly | None = None
    for part in parts:
        if part.HasField("head"):
            assembly = Assembly(part.head)
        elif assembly is None:
            raise ProtocolError("got data of an image before the message that begins the image")
        else:
            assembly.add(part.data)
    if assembly is None:
        raise ProtocolError("got no data of an image; expected the message that begins the image")
    return assembly.medium()


def _size(array: pb.MediumArray) -> int:
    if array.dtype not in _ITEM_BYTES:
        raise ProtocolError(
            f"an image has an array of type {array.dtype[:40]!r}; must be one of {', '.join(_ITEM_BYTES)}"
        )
    num_items: int = math.prod(array.shape)
    return _ITEM_BYTES[array.dtype] * num_items
