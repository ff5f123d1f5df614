"""Writes files that are either complete or absent, computes their digests, and finds temporary files of ended
processes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a file, flush it to disk, then rename it: the final name never shows an incomplete file."""
    temporary = path.with_name(f"tmp-{os.getpid()}-{path.name}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_stale(path: Path) -> bool:
    """Return whether this is the temporary file of a process that has ended."""
    parts = path.name.split("-", 2)
    if parts[0] != "tmp" or len(parts) != 3 or not parts[1].isdigit():
        return False
    try:
        os.kill(int(parts[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(parts[1]) == os.getpid()


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
