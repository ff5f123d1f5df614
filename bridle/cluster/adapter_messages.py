"""What a router and its replicas say to each other about adapters; parts of `replica_messages`.

A replica is told all that the router has found out about an adapter's files, so that it need not look at them before
it reads them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from bridle.lora import AdapterFiles, AdapterState, LoraShape
from bridle.lora.peft_config import PeftConfig
from bridle.lora.tensors import shared_shapes


class _Wire(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages."""


class AddAdapter(_Wire):
    """Requests may use it from now on."""

    key: str
    folder: str
    root: str
    digest: str
    config: PeftConfig
    shapes: tuple[tuple[str, LoraShape], ...]
    num_bytes: int


class RemoveAdapter(_Wire):
    key: str


class FetchAdapter(_Wire):
    """Bring it into memory."""

    key: str


class AdapterFetched(_Wire):
    """It is in memory, or why it is not."""

    key: str
    error: tuple[str, str, str | None] | None


#: All that a replica is told.
AdapterMessage = AddAdapter | RemoveAdapter | FetchAdapter
#: Where an adapter is at a replica: its state, its error, its users.
AdapterNews = tuple[AdapterState, str | None, int]


def pack_adapter(key: str, files: AdapterFiles) -> AddAdapter:
    shapes = tuple(files.shapes.items())
    return AddAdapter(key, str(files.folder), str(files.root), files.digest, files.config, shapes, files.num_bytes)


def unpack_adapter(message: AddAdapter) -> AdapterFiles:
    shapes = shared_shapes(message.shapes)
    return AdapterFiles(
        Path(message.folder), Path(message.root), message.digest, message.config, shapes, message.num_bytes
    )
