"""Inspects an adapter's two files before they are used: adapter_config.json and adapter_model.safetensors. Both files
must be within size limits, and no other file of the folder is opened. A digest of both files then identifies the
weights, so that bridle detects a later change of the files.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from bridle.errors import AdapterRefused
from bridle.lora.hub import fetch_adapter, is_hub_id
from bridle.lora.peft_config import LoraShape, PeftConfig, read_config
from bridle.lora.tensors import MAX_HEADER_BYTES, read_header, shapes_of

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 2 << 30
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_LISTED = 1_000
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that passed inspection. `shapes` has the shapes of the adapter's matrices for each linear layer, by
    the layer's name in the model. `digest` covers all bytes of both files."""

    folder: Path
    root: Path  # both files must be under it after links are resolved
    digest: str
    config: PeftConfig
    shapes: Mapping[str, LoraShape]
    num_bytes: int

    @property
    def rank(self) -> int:
        """Return the largest rank of any layer."""
        return max(shape.rank for shape in self.shapes.values())

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the kinds of layers that the adapter changes, such as `q_proj`."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.shapes))


def find_adapter(source: str, revision: str | None = None) -> AdapterFiles:
    """Return the adapter in `source`, a folder or a hub repository, which is downloaded if necessary. Raises
    `AdapterRefused` with the reason."""
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        return open_adapter(folder)
    if not is_hub_id(source):
        raise AdapterRefused(f"{source!r} is neither an existing folder nor a hub id such as 'owner/name'", "source")
    limits = {CONFIG_NAME: MAX_CONFIG_BYTES, WEIGHTS_NAME: MAX_WEIGHTS_BYTES}
    folder = fetch_adapter(source, revision, limits)
    try:
        return open_adapter(folder, folder.parent.parent)  # the hub's cache keeps the files next to the snapshots
    except AdapterRefused as error:  # the path of the cache does not help the user
        raise AdapterRefused(str(error).replace(str(folder.resolve()), source), error.param) from None


def open_adapter(folder: Path, root: Path | None = None) -> AdapterFiles:
    """Inspect the two files of the adapter in `folder`. With all links resolved, the files must be under `root` (None:
    under the folder itself). The header of the weights' file is checked before the weights are read. The weights are
    read in pieces, so they need little memory."""
    folder, root = _resolve(folder, root)
    config_bytes = _read(folder, CONFIG_NAME, root, MAX_CONFIG_BYTES)
    config = read_config(config_bytes)
    digest = _digest_of(config_bytes)
    with _opened(folder, WEIGHTS_NAME, root, MAX_WEIGHTS_BYTES) as (file, size):
        start = file.read(min(size, 8 + MAX_HEADER_BYTES))
        files = _judge(folder, root, config, start, size)
        digest.update(start)
        num_read = len(start)
        while num_read < size and (chunk := file.read(min(size - num_read, CHUNK_BYTES))):
            digest.update(chunk)
            num_read += len(chunk)
    return replace(files, digest=digest.hexdigest())


def read_adapter(folder: Path, root: Path | None = None) -> tuple[AdapterFiles, bytes]:
    """Inspect an adapter as `open_adapter` does. Also return the inspected bytes of the adapter's weights' file."""
    folder, root = _resolve(folder, root)
    config_bytes = _read(folder, CONFIG_NAME, root, MAX_CONFIG_BYTES)
    weights = _read(folder, WEIGHTS_NAME, root, MAX_WEIGHTS_BYTES)
    files = _judge(folder, root, read_config(config_bytes), weights, len(weights))
    digest = _digest_of(config_bytes)
    digest.update(weights)
    return replace(files, digest=digest.hexdigest()), weights


def _resolve(folder: Path, root: Path | None) -> tuple[Path, Path]:
    folder = folder.resolve()
    return folder, folder if root is None else root.resolve()


def _digest_of(config: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(config, digest_size=16)


def _judge(folder: Path, root: Path, config: PeftConfig, weights: bytes, size: int) -> AdapterFiles:
    """Check the header of a weights' file of `size` bytes. The field `digest` of the result is still empty."""
    header = read_header(weights, size)
    num_bytes = sum(entry.num_bytes for entry in header.values())
    return AdapterFiles(folder, root, "", config, shapes_of(header, config), num_bytes)


def _read(folder: Path, name: str, root: Path, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes. If the file grows while it is read, the additional bytes are
    ignored."""
    with _opened(folder, name, root, limit) as (file, size):
        return file.read(size)


@contextmanager
def _opened(folder: Path, name: str, root: Path, limit: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open a plain file of at most `limit` bytes under `root`; yield the file and its size. Links that leave `root`,
    and pipes, are refused."""
    try:
        path = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError):
        raise AdapterRefused(_why_missing(folder, name), "source") from None
    if not path.is_relative_to(root):
        raise AdapterRefused(f"{folder / name} links to a file outside of the adapter's folder", "source")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterRefused(f"{folder / name} cannot be read: {error.strerror}", "source") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRefused(f"{folder / name} is not a regular file", "source")
        if status.st_size > limit:
            raise AdapterRefused(f"{folder / name} has {status.st_size} bytes; at most {limit} are read", "source")
        with open(descriptor, "rb", closefd=False) as file:
            yield file, status.st_size
    except OSError as error:  # a disk error while reading
        raise AdapterRefused(f"{folder / name} cannot be read: {error.strerror}", "source") from None
    finally:
        os.close(descriptor)


def _why_missing(folder: Path, name: str) -> str:
    if name == WEIGHTS_NAME:
        for number, path in enumerate(folder.iterdir()):
            if path.suffix in _PICKLED:
                return f"{folder} holds pickled weights ({path.name}), which are never loaded; save it as safetensors"
            if number >= _MAX_LISTED:
                break
    return f"{folder} has no {name}; it is not an adapter that PEFT saved"
