"""How a router tells a shard to load and unload adapters, and how the shard does it.

A call carries the path of an adapter, never its weights. The shard reads the weights itself, and checks that they are
the files that the router has looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridle.cluster.faults import decode_failure, encode_failure
from bridle.cluster.proto import shard_pb2 as pb
from bridle.errors import AdapterRefused, UnsupportedFeature
from bridle.lora import AdapterDevice, AdapterFiles, LayerShape, as_device, open_adapter

#: Names all adapters in a request to unload; no adapter has this name.
EVERY_ADAPTER = ""


def read_call(key: str, files: AdapterFiles) -> pb.LoadAdapterRequest:
    """A request that the shard read the adapter's files from disk."""
    return pb.LoadAdapterRequest(
        name=key, source=str(files.folder), root=str(files.root), digest=files.digest, tier=pb.HOST
    )


def place_call(key: str) -> pb.LoadAdapterRequest:
    """A request that the shard bring the adapter to the device."""
    return pb.LoadAdapterRequest(name=key, tier=pb.DEVICE)


def displace_call(key: str) -> pb.UnloadAdapterRequest:
    """A request that the shard give up the adapter's place on the device."""
    return pb.UnloadAdapterRequest(name=key, tier=pb.DEVICE)


def drop_call(key: str) -> pb.UnloadAdapterRequest:
    """A request that the shard give up the adapter's place on the host."""
    return pb.UnloadAdapterRequest(name=key, tier=pb.HOST)


def load(executor: object, request: pb.LoadAdapterRequest) -> None:
    """Load an adapter into `executor` as the request says. Raises `AdapterRefused`."""
    device = require_device(executor)
    if request.tier == pb.DEVICE:
        device.place_adapter(request.name)
        return
    files = open_adapter(Path(request.source), Path(request.root))
    if files.digest != request.digest:
        raise AdapterRefused("the adapter's files on the shard's machine are not those that the router knows", "source")
    device.read_adapter(request.name, files)


def unload(executor: object, request: pb.UnloadAdapterRequest) -> None:
    """Unload one adapter or all from `executor`, as the request says."""
    device = require_device(executor)
    if request.name == EVERY_ADAPTER:
        device.drop_adapters()
    elif request.tier == pb.DEVICE:
        device.displace_adapter(request.name)
    else:
        device.drop_adapter(request.name)


def attempt(work: Callable[[], None]) -> pb.Failure | None:
    """Run `work`; return its error as a message, or None if it succeeded."""
    try:
        work()
    except Exception as error:
        return encode_failure(0, error)
    return None


def check(reply: Any) -> None:
    """Raise the error that the other end reports in `reply`, if it reports one."""
    if reply.HasField("failure"):
        raise decode_failure(reply.failure)


def encode_layers(executor: object) -> list[pb.AdapterLayer]:
    """The layers of the model that take adapters, as messages."""
    device = as_device(executor)
    layers = {} if device is None else device.adapter_layers
    return [
        pb.AdapterLayer(
            name=name, in_features=one.in_features, out_features=one.out_features, is_transposed=one.is_transposed
        )
        for name, one in layers.items()
    ]


def decode_layers(reply: pb.InfoReply) -> Mapping[str, LayerShape]:
    return {one.name: LayerShape(one.in_features, one.out_features, one.is_transposed) for one in reply.adapter_layers}


def require_device(executor: object) -> AdapterDevice:
    """Return `executor` as one that applies adapters. Raises `UnsupportedFeature` if it does not."""
    device = as_device(executor)
    if device is None:
        raise UnsupportedFeature("this shard's backend applies no adapters", "adapter")
    return device
