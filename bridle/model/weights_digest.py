"""Computes the digest of a checkpoint's weights, and of the files that describe its model.

All bytes are read once. The digest is stored in the user's cache until a file changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from pathlib import Path

from bridle.file_cache import FileCache
from bridle.gguf.pointer import tower_of, weights_of
from bridle.gguf.shards import pieces_of

_PIECE_BYTES = 16 << 20
_THREADS = 4
_DESCRIPTIONS = ("config.json", "generation_config.json")


def weights_digest(folder: Path) -> str:
    """Return the digest of the checkpoint in a model folder. Raises `OSError` if a file cannot be read."""
    paths = _files(folder)
    states = [(str(path.resolve()), path.stat()) for path in paths]
    key = json.dumps([(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in states]).encode()
    files = FileCache("digests")
    place = files.path(folder.name, key)
    known = files.read_text(place)
    if known is not None:
        return known.decode()
    digest = blake2b(digest_size=16)
    with ThreadPoolExecutor(_THREADS, "bridle-digest") as threads:
        for path in paths:
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            for piece in threads.map(digest_piece, *zip(*_pieces(path), strict=True)):
                digest.update(piece)
    found = digest.hexdigest()
    files.write(place, found.encode(), [])
    return found


def _files(folder: Path) -> list[Path]:
    gguf = weights_of(folder)
    weights = sorted(folder.glob("*.safetensors")) if gguf is None else pieces_of(gguf)
    if (tower := tower_of(folder)) is not None:
        weights.append(tower)
    return [*weights, *(path for name in _DESCRIPTIONS if (path := folder / name).is_file())]


def _pieces(path: Path) -> Iterator[tuple[Path, int]]:
    for start in range(0, max(path.stat().st_size, 1), _PIECE_BYTES):
        yield path, start


def digest_piece(path: Path, start: int) -> bytes:
    """Return the digest of a piece of a file from byte `start` on. The digest is SHA-256, which is twice as fast as
    BLAKE2, because processors have instructions for SHA-256."""
    with path.open("rb") as file:
        return sha256(os.pread(file.fileno(), _PIECE_BYTES, start)).digest()
