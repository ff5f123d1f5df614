"""Calls with which a router loads and unloads LoRA adapters on a shard.

A call carries the path of an adapter, never its weights. The shard reads the weights itself, and checks that its files
equal those that the router has inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridle.distributed.codec.errors import decode_failure, encode_failure
from bridle.distributed.proto import shard_pb2 as pb
from bridle.errors import AdapterRefused
from bridle.lora import AdapterFiles, LayerShape, find_device, open_adapter, require_device

#: Names all adapters in a request to unload; no adapter has this name.
EVERY_ADAPTER = ""


class CalledDevice:
    """Implements `bridle.lora.AdapterDevice` by messages. The functions `load` and `unload` execute a message, in this
    process or another one."""

    def __init__(
        self,
        layers: Mapping[str, LayerShape],
        load: Callable[[pb.LoadAdapterRequest], None],
        unload: Callable[[pb.UnloadAdapterRequest], None],
    ) -> None:
        self.layers = layers
        self.epoch = 0  # incremented after each reconnection, because the other process has lost its adapters
        self._load = load
        self._unload = unload

    def read(self, key: str, files: AdapterFiles) -> None:
        self._load(
            pb.LoadAdapterRequest(
                name=key, source=str(files.folder), root=str(files.root), digest=files.digest, tier=pb.HOST
            )
        )

    def place(self, key: str) -> None:
        self._load(pb.LoadAdapterRequest(name=key, tier=pb.DEVICE))

    def displace(self, key: str) -> None:
        self._unload(pb.UnloadAdapterRequest(name=key, tier=pb.DEVICE))

    def drop(self, key: str) -> None:
        self._unload(pb.UnloadAdapterRequest(name=key, tier=pb.HOST))

    def clear(self) -> None:
        self._unload(pb.UnloadAdapterRequest(name=EVERY_ADAPTER))


def load(executor: object, request: pb.LoadAdapterRequest) -> None:
    """Load the adapter of a message into `executor`. Raises `AdapterRefused`."""
    device = require_device(executor)
    if request.tier == pb.DEVICE:
        device.place(request.name)
        return
    files = open_adapter(Path(request.source), Path(request.root))
    if files.digest != request.digest:
        raise AdapterRefused(
            "the adapter's files on the shard's machine differ from the files on the server's machine", "source"
        )
    device.read(request.name, files)


def unload(executor: object, request: pb.UnloadAdapterRequest) -> None:
    """Unload the adapter of a message, or all adapters, from `executor`."""
    device = require_device(executor)
    if request.name == EVERY_ADAPTER:
        device.clear()
    elif request.tier == pb.DEVICE:
        device.displace(request.name)
    else:
        device.drop(request.name)


def attempt(work: Callable[[], None]) -> pb.Failure | None:
    """Run `work`. Returns the error of `work` as a protocol buffer message, or None without an error."""
    try:
        work()
    except Exception as error:
        return encode_failure(0, error)
    return None


def check(reply: Any) -> None:
    """Raise the error in the other process's `reply`, if the reply has an error."""
    if reply.HasField("failure"):
        raise decode_failure(reply.failure)


def encode_layers(executor: object) -> list[pb.AdapterLayer]:
    """Return the model's layers that support adapters, as protocol buffer messages."""
    device = find_device(executor)
    layers = {} if device is None else device.layers
    return [
        pb.AdapterLayer(
            name=name, in_features=one.in_features, out_features=one.out_features, is_transposed=one.is_transposed
        )
        for name, one in layers.items()
    ]


def decode_layers(reply: pb.InfoReply) -> Mapping[str, LayerShape]:
    return {one.name: LayerShape(one.in_features, one.out_features, one.is_transposed) for one in reply.adapter_layers}
