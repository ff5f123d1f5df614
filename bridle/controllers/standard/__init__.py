"""The controllers that come with bridle: their names and their built modules.

Each module is in this folder as `NAME.wasm.xz`. The module that takes longest to compile is also here as machine code
for the most common machines. `manifest.json` has the hash of every file, and a file with another hash is refused. In a
checkout `dev.controllers` has the source of each module and builds it again. This package does not know the runtime
that runs the controllers.
"""

from __future__ import annotations

import hashlib
import lzma
from functools import cache
from pathlib import Path

import msgspec

from bridle.errors import ControllerUnavailable, InvalidRequest

FOLDER = Path(__file__).parent
MANIFEST = FOLDER / "manifest.json"
#: Maximum size of an unpacked module in bytes.
MAX_BYTES = 64 << 20


class ShippedCode(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest's entry for machine code. `facts` is the compiler's metadata about the module, as JSON."""

    file: str
    sha256: str
    xz_sha256: str
    bytes: int
    facts: str


class StandardModule(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest's entry for a module. `sha256` is the hash of the module, and so its id on every server. `sources`
    are pinned downloads with their hashes, `tools` the packages that built the module with their versions. `code` has
    machine code by a key of the settings with which it was compiled, which a runtime can compute."""

    file: str
    sha256: str
    xz_sha256: str
    bytes: int
    sources: dict[str, str] = {}
    tools: dict[str, str] = {}
    code: dict[str, ShippedCode] = {}


@cache
def manifest() -> dict[str, StandardModule]:
    """Return the entries of all shipped modules, by name."""
    try:
        return msgspec.json.decode(MANIFEST.read_bytes(), type=dict[str, StandardModule])
    except (OSError, msgspec.DecodeError) as error:
        raise ControllerUnavailable(f"{MANIFEST} cannot be read: {error}; install bridle again") from None


def names() -> tuple[str, ...]:
    """Return the names of the standard controllers, in alphabetical order."""
    return tuple(sorted(manifest()))


def load(name: str) -> bytes:
    """Return the module of a standard controller. Raises `InvalidRequest` for an unknown name, and
    `ControllerUnavailable` if the file is not the shipped one."""
    shipped = manifest().get(name)
    if shipped is None:
        raise InvalidRequest(f"there is no standard controller {name!r}; known are {', '.join(names())}")
    return _read(shipped)


def load_code(name: str, settings: str) -> tuple[bytes, str] | None:
    """Return machine code of a standard controller and the compiler's metadata; None if there is none for these
    settings. Raises `ControllerUnavailable` if the file is not the shipped one."""
    shipped = manifest()[name].code.get(settings)
    return None if shipped is None else (_read(shipped), shipped.facts)


def _read(shipped: StandardModule | ShippedCode) -> bytes:
    path = FOLDER / shipped.file
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise _damaged(path, error.strerror or "cannot be read") from None
    _check(path, packed, shipped.xz_sha256)
    data = _unpack(path, packed)
    _check(path, data, shipped.sha256)
    return data


def _unpack(path: Path, packed: bytes) -> bytes:
    try:
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        data = unpacking.decompress(packed, MAX_BYTES)
    except lzma.LZMAError as error:
        raise _damaged(path, str(error)) from None
    if not unpacking.eof:
        raise _damaged(path, f"the file is cut off, or unpacks to more than {MAX_BYTES} bytes")
    return data


def _check(path: Path, data: bytes, wanted: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise _damaged(path, f"the file's SHA-256 is {found}, but the manifest says {wanted}")


def _damaged(path: Path, what: str) -> ControllerUnavailable:
    return ControllerUnavailable(f"the standard controller {path} is damaged: {what}; install bridle again")
