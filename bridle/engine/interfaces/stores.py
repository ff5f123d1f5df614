"""Interfaces of stores next to the KV cache: adapters, control vectors, and features of images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from bridle.engine.multimodal.multimodal_inputs import MultiModalItem
from bridle.errors import BridleError


class AdapterStore(Protocol):
    """Keeps the adapters of a model, by key (`Request.adapter`). No method may block. Only the engine's thread calls
    the store, except for `check_known`."""

    def check_known(self, key: str) -> None:
        """Raise `UnknownAdapter` if requests may not use the adapter. Safe from any thread."""

    def open(self, key: str) -> None:
        """Record that a request uses the adapter from now on. Raises `UnknownAdapter`."""

    def leave(self, key: str) -> None:
        """Release the adapter for a request that has ended."""

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        """Return the adapters of `keys` that are on the device. In `keys`, the most urgent adapters come first. The
        returned adapters stay on the device until the next call. The store begins to load the other adapters in
        `keys`."""

    def take_failures(self) -> dict[str, BridleError]:
        """Return the adapters in use that cannot be loaded, each with its error. The error of each adapter is returned
        once."""

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of adapters in each kind of memory, of loads and of evictions, by the names of
        `EngineStatistics` fields. Safe from any thread."""

    def close(self) -> None:
        """Stop loading adapters to the device. Idempotent."""


class VectorStore(Protocol):
    """Keeps a model's control vectors, by name. Safe from any thread."""

    def check(self, names: Iterable[str]) -> None:
        """Raise `UnknownControlVector` if requests may not use one of the named vectors."""

    def check_probe(self, name: str, layer: int | None) -> None:
        """Raise `InvalidRequest` if the vector has no direction for the layer (None: the last layer)."""

    def open(self, names: Iterable[str]) -> dict[str, str]:
        """Return the keys of the control vectors of a new request, by name. The vectors stay loaded until `leave`. If a
        name is unknown, no vector is kept loaded, and `UnknownControlVector` is raised."""
        raise NotImplementedError

    def leave(self, keys: Iterable[str]) -> None:
        """Release the control vectors with the given keys for a request that has ended."""


class MediaDevice(Protocol):
    """Encodes images (`media`) on an executor's device, and keeps their features by key until they are dropped. One
    thread calls `encode` and `drop`; that thread is not the engine's. Both methods raise `ShardUnavailable` if the
    device cannot be reached. `epoch` changes when all features are lost."""

    epoch: int
    max_bytes: int

    def num_bytes(self, medium: MultiModalItem) -> int:
        """Return the bytes of memory that the features of an image take."""

    def encode(self, medium: MultiModalItem) -> None:
        """Compute the features of an image. After `encode` returns, plans may refer to the features. Raises
        `MediaRefused`."""

    def drop(self, key: bytes) -> None:
        """Release the features of an image that no plan refers to; unknown keys are ignored."""

    def clear(self) -> None:
        """Release all features, including those that are being computed."""


@runtime_checkable
class BatchedMedia(MediaDevice, Protocol):
    """A device that can encode several images in one call."""

    def together(self, media: Sequence[MultiModalItem]) -> list[MultiModalItem]:
        """Return the first image of `media`, with those of the following images that are best encoded in the same
        call."""

    def encode_all(self, media: Sequence[MultiModalItem]) -> None:
        """Compute the features of images that `together` returned. If encoding fails, no features are kept, and each
        image is then encoded alone."""


class MediaStore(Protocol):
    """Encodes images and keeps their features by key on the device that computes the model. No method may block. Only
    the engine's thread calls the store, except for `check` and `counts`."""

    def check(self, media: Sequence[MultiModalItem]) -> None:
        """Raise `InvalidRequest` for an image that this device can never encode. Raise `Overloaded` if there is no room
        for the image now. Safe from any thread."""

    def open(self, medium: MultiModalItem) -> None:
        """Record that a request uses the medium from now on."""

    def leave(self, key: bytes) -> None:
        """Release the medium for a request that has ended."""

    def begin_step(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the media of `keys` whose features are ready. In `keys`, the most urgent media come first. The
        returned features stay until the next call. The store begins to encode the media in `keys` whose features are
        not ready. The most urgent medium is always encoded."""

    def take_failures(self) -> Mapping[bytes, BridleError]:
        """Return the media in use that cannot be encoded, each with its error. The error of each medium is returned
        once."""

    def counts(self) -> Mapping[str, Any]:
        """Return counts by the names of `EngineStatistics` fields. Safe from any thread."""

    def close(self) -> None:
        """Stop encoding. Idempotent."""
