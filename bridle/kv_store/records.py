"""Records of a segment file. A record is a header with digests, and the bytes of one block.

The header has the length of its record, so all records of a file can be found without an index. A header is valid only
if its own digest is right. A block is valid only if its bytes match the digest in the header. So data that was damaged
by a crash, a full disk or a defect is never read as a block.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

#: The last byte is the version of the format.
MAGIC = b"bridleK\x02"
KEY_BYTES = 16
_FIELDS = struct.Struct("<8sQ16s16s16s")  # magic, bytes of the block, key, tag of the tenant, digest of the block
HEADER_BYTES = _FIELDS.size + KEY_BYTES  # including the header's own digest
#: Key and tag of a block that was erased.
ERASED = bytes(KEY_BYTES)
_PAGE_WORDS = 512
MAX_BLOCK_BYTES = 1 << 30

Buffer = bytes | bytearray | memoryview


class Snapshot(Protocol):
    """A copy of a block that a device makes in the background."""

    def copy_into(self, memory: memoryview) -> None:
        """Wait for the device's copy, and write it into `target`, which has the size of the block. Safe from any
        thread."""


def copy_block(block: Buffer | Snapshot, memory: memoryview) -> None:
    """Write a block into `target`, which has the size of the block."""
    if isinstance(block, bytes | bytearray | memoryview):
        memory[:] = block
    else:
        block.copy_into(memory)


def bytes_of(block: Buffer | Snapshot, num_bytes: int) -> Buffer:
    """Return the bytes of a block of `size` bytes."""
    if isinstance(block, bytes | bytearray | memoryview):
        return block
    memory = memoryview(bytearray(num_bytes))
    block.copy_into(memory)
    return memory


@dataclass(frozen=True, slots=True)
class Header:
    """Fields of a header. `key` names the block; `tenant` is the tag of the user that owns the block."""

    num_bytes: int
    key: bytes
    tenant: bytes
    digest: bytes


def tenant_tag(tenant: str) -> bytes:
    """Return the tag under which the blocks of a user are stored."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES, person=b"bridle-kv-tenant").digest()


def state_key(digest: bytes) -> bytes:
    """Return the key of the recurrent state at the end of the block `key`."""
    return blake2b(digest, digest_size=KEY_BYTES, person=b"bridle-kv-state").digest()


def block_digest(data: Buffer) -> bytes:
    """Return a digest that detects damage of a block. The digest covers sums of the block's 64-bit words, and the bytes
    after its last page. Words are summed by page of 4 KiB and by position in a page. A sum changes if a few words are
    damaged, or if a page is lost, outdated or in the wrong position. Computing the sums takes a tenth of the time of a
    cryptographic digest."""
    import numpy as np  # imported here, because the engine alone does not need it

    whole = len(data) // (8 * _PAGE_WORDS) * _PAGE_WORDS
    pages = np.frombuffer(data, np.uint64, whole).reshape(-1, _PAGE_WORDS)
    sums = (np.add.reduce(pages, axis=axis).tobytes() for axis in (0, 1))
    return _digest(b"".join((*sums, memoryview(data)[8 * whole :], struct.pack("<Q", len(data)))))


def pack_header(header: Header) -> bytes:
    """Return the header in the form of bytes for a file."""
    fields = _FIELDS.pack(MAGIC, header.num_bytes, header.key, header.tenant, header.digest)
    return fields + _digest(fields)


def read_header(data: bytes) -> Header | None:
    """Return the header that the bytes contain; None if the header is incomplete or damaged."""
    if len(data) != HEADER_BYTES or _digest(data[: _FIELDS.size]) != data[_FIELDS.size :]:
        return None
    magic, num_bytes, key, tenant, digest = _FIELDS.unpack_from(data)
    if magic != MAGIC or num_bytes > MAX_BLOCK_BYTES:
        return None
    return Header(num_bytes, key, tenant, digest)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()
