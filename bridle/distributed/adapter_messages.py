"""Messages about LoRA adapters between a router and its replicas, in addition to those in `replica_messages`.

The router sends a replica the properties of an adapter's files, so that the replica need not inspect the files itself.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from bridle.lora import AdapterFiles, AdapterState, LoraShape
from bridle.lora.peft_config import PeftConfig
from bridle.lora.tensors import shared_shapes


class Wire(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages between a router and its replicas."""


class AddAdapter(Wire):
    """Router to replica: requests may use this adapter from now on."""

    key: str
    folder: str
    root: str
    digest: str
    config: PeftConfig
    shapes: tuple[tuple[str, LoraShape], ...]
    num_bytes: int


class RemoveAdapter(Wire):
    key: str


class FetchAdapter(Wire):
    """Router to replica: load this adapter into memory."""

    key: str


class AdapterFetched(Wire):
    """Replica to router: the adapter is in memory, or `error` has the reason why it is not."""

    key: str
    error: tuple[str, str, str | None] | None


#: All messages about adapters that a router sends to a replica.
AdapterMessage = AddAdapter | RemoveAdapter | FetchAdapter
#: The place of an adapter at a replica: its state, its error, its number of users.
AdapterNews = tuple[AdapterState, str | None, int]


def pack_adapter(key: str, files: AdapterFiles) -> AddAdapter:
    shapes = tuple(files.shapes.items())
    return AddAdapter(key, str(files.folder), str(files.root), files.digest, files.config, shapes, files.num_bytes)


def unpack_adapter(message: AddAdapter) -> AdapterFiles:
    shapes = shared_shapes(message.shapes)
    return AdapterFiles(
        Path(message.folder), Path(message.root), message.digest, message.config, shapes, message.num_bytes
    )
