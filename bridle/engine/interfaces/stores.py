"""Interfaces of stores next to the KV cache: adapters and features of media."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from bridle.engine.multimodal.multimodal_inputs import MultiModalItem
from bridle.errors import BridleError


class AdapterStore(Protocol):
    """Keeps a model's adapters, by key (`Request.adapter`). None of its calls may block. The engine's thread calls all
    but `check_known`."""

    def check_known(self, key: str) -> None:
        """Raise `UnknownAdapter` unless requests may use the adapter. Any thread may ask."""

    def open(self, key: str) -> None:
        """Record that a request uses the adapter from now on. Raises `UnknownAdapter`."""

    def leave(self, key: str) -> None:
        """Release the adapter, because a request that used it has ended."""

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        """Return the adapters among `keys`, the most urgent first, that are on the device; they stay there until the
        next call. The others are brought there meanwhile."""

    def take_failures(self) -> dict[str, BridleError]:
        """Adapters in use that cannot be loaded, and why; each is returned once."""

    def counts(self) -> Mapping[str, int]:
        """Return the number of adapters on each tier, and of loads and evictions: fields of `EngineStatistics`.
        Safe from any thread."""

    def close(self) -> None:
        """Stop loading adapters to the device. Idempotent."""


class VectorStore(Protocol):
    """Keeps a model's control vectors, by name. Any thread may ask."""

    def check(self, names: Iterable[str]) -> None:
        """Raise `UnknownControlVector` unless requests may use all of them."""

    def check_probe(self, name: str, layer: int | None) -> None:
        """Raise `InvalidRequest` unless the vector has a direction for a layer (None: the last one)."""

    def open(self, names: Iterable[str]) -> dict[str, str]:
        """Return the keys of the vectors of a request that begins, by name. They stay until `leave`. Raises
        `UnknownControlVector`; then none is held."""
        raise NotImplementedError

    def leave(self, keys: Iterable[str]) -> None:
        """Release these keys, because a request that used them has ended."""


class MediaDevice(Protocol):
    """Media encoder of an executor (`media`). It encodes images and keeps their features by key until they are
    dropped. One thread, not the engine's, calls `encode` and `drop`; both raise `ShardUnavailable` if the device
    cannot be reached. `epoch` changes when all features were lost."""

    epoch: int
    max_bytes: int

    def num_bytes(self, medium: MultiModalItem) -> int:
        """The memory that its features take."""

    def encode(self, medium: MultiModalItem) -> None:
        """Compute the features of an image. When this returns, plans may name them. Raises `MediaRefused`."""

    def drop(self, key: bytes) -> None:
        """Release the features of an image that no plan names; unknown keys are ignored."""

    def clear(self) -> None:
        """Release all features, also those that are being computed."""


@runtime_checkable
class BatchedMedia(MediaDevice, Protocol):
    """A device that may encode several images at once."""

    def together(self, media: Sequence[MultiModalItem]) -> list[MultiModalItem]:
        """The first of `media` and those behind it that it would best be encoded with."""

    def encode_all(self, media: Sequence[MultiModalItem]) -> None:
        """Compute the features of images that belong `together`. After an error there are none; each image is then
        encoded alone."""


class MediaStore(Protocol):
    """Encodes images and keeps their features where the model computes, by key. None of its calls may block. The
    engine's thread calls all but `check` and `counts`."""

    def check(self, media: Sequence[MultiModalItem]) -> None:
        """Raise `InvalidRequest` for an image that can never be encoded here, and `Overloaded` where there is no room
        for it now. Any thread may ask."""

    def open(self, medium: MultiModalItem) -> None:
        """Record that a request uses the medium from now on."""

    def leave(self, key: bytes) -> None:
        """Release the medium, because a request that used it has ended."""

    def begin_step(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the media among `keys`, the most urgent first, whose features are there; they stay until the next
        call. Others are encoded meanwhile, the first of them in any case."""

    def take_failures(self) -> Mapping[bytes, BridleError]:
        """Media in use that cannot be encoded, and why; each is returned once."""

    def counts(self) -> Mapping[str, Any]:
        """Fields of `EngineStatistics`. Any thread may ask."""

    def close(self) -> None:
        """Stop encoding. Idempotent."""
