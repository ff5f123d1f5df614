"""Blocks of one model on disk: segments in a folder that several processes share, and an index in memory.

`FOLDER/SCOPE/*.kv` are the segments of one scope. A scope is a model and the format of its KV. The index is built in
memory from the headers of the records. So there is no index file that could be wrong. A process appends only to its own
segments. A process finds the blocks of other processes when it refreshes its index. The limit applies to all scopes
together. Before a process begins a segment, the least recently used complete segments are removed. A segment that is
being written counts with its full size. While other users have blocks of the model, a user gets at most half of the
limit. If a user exceeds half of the limit, segments of that user are removed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bridle.kv_store import segment as segments
from bridle.kv_store.cipher import BlockCipher
from bridle.kv_store.records import ERASED, HEADER_BYTES, Buffer, tenant_tag
from bridle.kv_store.segment import SUFFIX, Segment, SegmentWriter

_log = logging.getLogger(__name__)

#: Number of segments into which the limit is divided, and maximum size of a segment.
NUM_SEGMENTS, _MAX_SEGMENT_BYTES = 16, 256 << 20
#: Number of small segments, left by restarts, that are kept beyond the limit of full ones: each is an open file.
SMALL_FILES = 48
#: Number of bytes of a disk that a store leaves free.
RESERVE_BYTES = 1 << 30
#: Maximum share of the limit for one user's blocks while other users have blocks.
MAX_SHARE = 0.5
#: Name of the file whose lock is held while segments are begun or removed.
LOCK = ".lock"


@dataclass(slots=True)
class _Contents:
    """The records of a segment that were read so far: their keys, and the number of bytes of each user."""

    segment: Segment
    keys: list[bytes] = field(default_factory=list)
    num_bytes: Counter[bytes] = field(default_factory=Counter)


class SegmentStore:
    """The blocks of `scope` in `folder`, encrypted if there is a `cipher`. The keys of blocks must be derived from
    `root`. Safe from any thread, except that only one thread may append."""

    def __init__(self, folder: Path, scope: str, limit: int, cipher: BlockCipher | None = None) -> None:
        self.folder, self.scope, self.limit, self._cipher = folder, scope, limit, cipher
        self.root = scope if cipher is None else cipher.derive(scope)
        self._own = folder / scope
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.segment_bytes = min(limit // NUM_SEGMENTS, _MAX_SEGMENT_BYTES)
        self.max_files = SMALL_FILES + limit // max(self.segment_bytes, 1)
        self.index: dict[bytes, tuple[Segment, int]] = {}
        self._segments: dict[Path, _Contents] = {}
        self._held: Counter[bytes] = Counter()  # bytes of each user in all segments
        self._lock = threading.Lock()
        self._writer: SegmentWriter | None = None
        self._has_failed = False  # whether the last attempt to write failed
        self.refresh()

    def __contains__(self, key: bytes) -> bool:
        return key in self.index

    def __len__(self) -> int:
        return len(self.index)

    # -- reading -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Add the records that other processes have written to the index, and drop the records of removed segments."""
        with self._lock:
            found = set(self._own.glob(f"*{SUFFIX}"))
            for path in self._segments.keys() - found:
                self._forget(path)
            for path in sorted(found - self._segments.keys()):
                with contextlib.suppress(OSError):  # the file was removed a moment ago
                    self._segments[path] = _Contents(Segment(path))
            for contents in self._segments.values():
                self._scan(contents)

    def _scan(self, contents: _Contents) -> None:
        for position, header in contents.segment.scan():
            if header.key != ERASED:
                contents.keys.append(header.key)
                self.index[header.key] = contents.segment, position
                contents.num_bytes[header.tenant] += header.num_bytes
                self._held[header.tenant] += header.num_bytes

    def _forget(self, path: Path) -> None:
        contents = self._segments.pop(path)
        self._held -= contents.num_bytes  # also drops users without bytes
        for key in contents.keys:
            if (place := self.index.get(key)) is not None and place[0] is contents.segment:
                del self.index[key]

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a block into `target`, which has the size of the block. Returns whether the block was found without
        damage. A damaged block is removed from the index."""
        place = self.index.get(key)
        if place is None:
            return False
        segment, position = place
        if self._read(segment, position, key, into):
            segment.note_use()
            return True
        self.drop(key, place)
        return False

    def drop(self, key: bytes, place: tuple[Segment, int] | None = None) -> None:
        """Remove a block from the index, so that it can be written again. With a `place`, the block is removed only if
        the index has it at this place."""
        with self._lock:
            if place is None or self.index.get(key) == place:
                self.index.pop(key, None)

    def _read(self, segment: Segment, position: int, key: bytes, into: memoryview) -> bool:
        if self._cipher is None:
            return segment.read(position, key, into)
        sealed = memoryview(bytearray(len(into) + self._cipher.overhead))
        return segment.read(position, key, sealed) and self._cipher.open(key, sealed, into)

    # -- writing -----------------------------------------------------------------------------------------

    def append(self, key: bytes, tenant: bytes, block: Buffer) -> bool:
        """Write a block, unless the store already has it. Returns whether the store has the block afterwards. The block
        is not stored if the disk is full or the limit is too small. The block is also not stored if a segment that is
        being written fills the user's share."""
        if key in self.index:
            return True
        if self._cipher is not None:
            block = self._cipher.seal(key, block)
        size = HEADER_BYTES + len(block)
        if size > self.segment_bytes:
            return False
        try:
            if not self._fits_share(tenant, size):
                return False
            if not self._has_segment_for(size):
                return False
            assert self._writer is not None
            self._writer.append(key, tenant, block)
            with self._lock:
                if self._writer.path not in self._segments:
                    self._segments[self._writer.path] = _Contents(Segment(self._writer.path))
                self._scan(self._segments[self._writer.path])
        except OSError as error:
            _log.warning("KV store %s: a block could not be stored: %s", self._own, error.strerror or error)
            self._has_failed = True
            return False
        self._has_failed = False
        return key in self.index

    def _fits_share(self, tenant: bytes, size: int) -> bool:
        """Return whether a block still leaves other users their share of the limit. To make room, segments that contain
        mostly this user's blocks are removed, the least recently used first."""
        most = self.limit * MAX_SHARE - size
        with self._lock:
            if self._held[tenant] <= most or self._held.keys() <= {tenant}:
                return True
            own = {path for path, each in self._segments.items() if 2 * each.num_bytes[tenant] > each.num_bytes.total()}
        used = sorted((used, path) for path, _, used in list_segments(self.folder) if path in own)
        with _locked(self.folder):
            for _, path in used:
                if self._held[tenant] > most and segments.remove_if_complete(path):
                    with self._lock:
                        self._forget(path)
        return self._held[tenant] <= most

    def _has_segment_for(self, size: int) -> bool:
        """Begin a segment if the block does not fit into the current one. Returns whether the block fits now. After a
        failed write, the process continues its current segment when the disk has room again. The process does not begin
        a new segment, which would cost a file descriptor."""
        writer = self._writer
        if writer is None or writer.size + size > self.segment_bytes or (self._has_failed and writer.is_lost):
            self._writer = self._begin_segment()
        elif self._has_failed:
            with _locked(self.folder):
                return self._make_room()
        return self._writer is not None

    def _begin_segment(self) -> SegmentWriter | None:
        self._end_segment()
        with _locked(self.folder):
            if not self._make_room():
                return None
            self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
            return SegmentWriter(self._own)

    def _end_segment(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _make_room(self) -> bool:
        """Remove the least recently used segments until a new one fits into the limit. Returns whether a new segment
        fits."""
        complete, taken = [], 0
        for path, size, used in list_segments(self.folder):
            if segments.is_being_written(path):
                taken += max(size, self.segment_bytes)
            else:
                complete.append((used, size, path))
                taken += size
        free = shutil.disk_usage(self.folder).free - RESERVE_BYTES
        for number, (_, size, path) in enumerate(sorted(complete)):
            is_few = len(complete) - number < self.max_files
            if is_few and taken + self.segment_bytes <= self.limit and free >= self.segment_bytes:
                break
            if segments.remove_if_complete(path):
                taken, free = taken - size, free + size
                with self._lock:
                    if path in self._segments:
                        self._forget(path)
        return taken + self.segment_bytes <= self.limit and free >= self.segment_bytes

    def close(self) -> None:
        """Close the segment of this process, which is then complete. Idempotent."""
        self._end_segment()


class NoDisk(SegmentStore):
    """A store that stores no blocks. The keys of blocks must be derived from `root`."""

    def __init__(self, root: str) -> None:
        self.root, self.limit = root, 0
        self.index = {}

    def refresh(self) -> None:
        """Do nothing, because there are no segments."""

    def append(self, key: bytes, tenant: bytes, block: Buffer) -> bool:
        return False

    def close(self) -> None:
        """Do nothing."""


def list_segments(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield each segment of all scopes: its file, its size, and the time of its last use."""
    for path in folder.glob(f"*/*{SUFFIX}"):
        with contextlib.suppress(OSError):
            state = path.stat()
            yield path, state.st_size, state.st_mtime


@dataclass(frozen=True, slots=True)
class ScopeFiles:
    """The segments of one scope. `used` is when the segments were last used, as a Unix time."""

    folder: Path
    num_bytes: int
    used: float


def list_scopes(folder: Path) -> list[ScopeFiles]:
    """Return all scopes of a store, the last used scope first."""
    found: dict[Path, ScopeFiles] = {}
    for path, size, used in list_segments(folder):
        known = found.get(path.parent, ScopeFiles(path.parent, 0, 0.0))
        found[path.parent] = ScopeFiles(path.parent, known.num_bytes + size, max(known.used, used))
    return sorted(found.values(), key=lambda scope: -scope.used)


def remove_scope(folder: Path) -> int:
    """Remove the segments of a scope, except those that a process is writing. Returns the number of freed bytes."""
    sizes = [(path, path.stat().st_size) for path in folder.glob(f"*{SUFFIX}")]
    freed = sum(size for path, size in sizes if segments.remove_if_complete(path))
    with contextlib.suppress(OSError):  # the folder is not empty
        folder.rmdir()
    return freed


def forget_tenant(folder: Path, tenant: str) -> int:
    """Erase all blocks of a user, for all models. Returns the number of erased blocks. Processes that use the store can
    no longer find the erased blocks."""
    return sum(segments.erase(path, tenant_tag(tenant)) for path, _, _ in list(list_segments(folder)))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside the `with` block, other processes cannot begin or remove segments."""
    with (folder / LOCK).open("ab") as file:
        segments.lock(file.fileno())
        yield
