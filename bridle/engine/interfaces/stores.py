"""Interfaces of stores next to the KV cache: adapters and features of media."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from bridle.engine.multimodal.multimodal_inputs import MultiModalItem
from bridle.errors import BridleError


class AdapterStore(Protocol):
    """Keeps a model's adapters, by key (`Request.adapter`). No method may block. The engine's thread makes all calls
    but `check_known`."""

    def check_known(self, key: str) -> None:
        """Raise `UnknownAdapter` unless requests may use the adapter. Safe from any thread."""

    def open(self, key: str) -> None:
        """Record that a request uses the adapter from now on. Raises `UnknownAdapter`."""

    def leave(self, key: str) -> None:
        """Release the adapter, because a request that used it has ended."""

    def begin_step(self, keys: Sequence[str]) -> set[str]:
        """Return the adapters among `keys`, the most urgent first, that are on the device. The returned adapters stay
        on the device until the next call. Loading of the other adapters starts."""

    def take_failures(self) -> dict[str, BridleError]:
        """Return the adapters in use that cannot be loaded, each once, with the error."""

    def counts(self) -> Mapping[str, int]:
        """Return the number of adapters on each tier, and of loads and evictions, by the names of fields of
        `EngineStatistics`. Safe from any thread."""

    def close(self) -> None:
        """Stop loading adapters to the device. Idempotent."""


class VectorStore(Protocol):
    """Keeps a model's control vectors, by name. Safe from any thread."""

    def check(self, names: Iterable[str]) -> None:
        """Raise `UnknownControlVector` unless requests may use all named vectors."""

    def check_probe(self, name: str, layer: int | None) -> None:
        """Raise `InvalidRequest` unless the vector has a direction for the layer (None: the last layer)."""

    def open(self, names: Iterable[str]) -> dict[str, str]:
        """Return the keys of the control vectors of a new request, by name. The vectors stay loaded until `leave`. If a
        name is unknown, no vector is held and `UnknownControlVector` is raised."""
        raise NotImplementedError

    def leave(self, keys: Iterable[str]) -> None:
        """Release the vectors with these keys, because a request that used them has ended."""


class MediaDevice(Protocol):
    """Encodes images on an executor's device (`media`), and keeps their features by key until they are dropped. One
    thread other than the engine's calls `encode` and `drop`; both raise `ShardUnavailable` if the device cannot be
    reached. `epoch` changes when all features were lost."""

    epoch: int
    max_bytes: int

    def num_bytes(self, medium: MultiModalItem) -> int:
        """Return the memory in bytes that the features of an image take."""

    def encode(self, medium: MultiModalItem) -> None:
        """Compute the features of an image. When this returns, plans may refer to them. Raises `MediaRefused`."""

    def drop(self, key: bytes) -> None:
        """Release the features of an image that no plan refers to; unknown keys are ignored."""

    def clear(self) -> None:
        """Release all features, also those that are being computed."""


@runtime_checkable
class BatchedMedia(MediaDevice, Protocol):
    """A device that may encode several images at once."""

    def together(self, media: Sequence[MultiModalItem]) -> list[MultiModalItem]:
        """Return the first of `media`, with those of the following images that are best encoded in the same call."""

    def encode_all(self, media: Sequence[MultiModalItem]) -> None:
        """Compute the features of images that `together` returned. After an error no features are kept, and each image
        is then encoded alone."""


class MediaStore(Protocol):
    """Encodes images and keeps their features by key where the model computes. No method may block. The engine's thread
    makes all calls but `check` and `counts`."""

    def check(self, media: Sequence[MultiModalItem]) -> None:
        """Raise `InvalidRequest` for an image that this device can never encode, and `Overloaded` if there is no room
        for it now. Safe from any thread."""

    def open(self, medium: MultiModalItem) -> None:
        """Record that a request uses the medium from now on."""

    def leave(self, key: bytes) -> None:
        """Release the medium, because a request that used it has ended."""

    def begin_step(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the media among `keys`, the most urgent first, whose features are ready; the features stay until the
        next call. Encoding of the other media starts; the most urgent one is always encoded."""

    def take_failures(self) -> Mapping[bytes, BridleError]:
        """Return the media in use that cannot be encoded, each once, with the error."""

    def counts(self) -> Mapping[str, Any]:
        """Return counts for fields of `EngineStatistics`. Safe from any thread."""

    def close(self) -> None:
        """Stop encoding. Idempotent."""
