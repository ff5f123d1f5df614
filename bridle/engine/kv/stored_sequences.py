"""Stores the KV of whole sequences, for a backend that keeps KV by sequence. KV is stored when a sequence ends, and
read when another sequence begins with the same tokens.

The store has the KV of a sequence in pieces, and a record of the sequence's tokens. Each block has a pointer to the
record of the sequence's tokens. The key of a pointer is the hash of all tokens up to the end of its block. A new
sequence follows the last pointer that it finds, compares its tokens with those in the record, and reads the KV. The KV
of a model with recurrent layers cannot be truncated. In a model with recurrent layers, only the last block has a
pointer. With recurrent layers, a new sequence must begin with all tokens of the stored sequence.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from bridle.engine.interfaces import Executor, SequenceStates, find_sequence_states
from bridle.engine.kv.block_manager import block_hash, root_hash
from bridle.engine.kv.stored_blocks import as_it_is
from bridle.engine.sequence import Sequence
from bridle.kv_store import BlockStore, LoadedBlock
from bridle.kv_store.records import Buffer, tenant_tag

#: Bytes of one piece of KV.
PIECE_BYTES = 4 << 20
#: Minimum number of tokens, beyond those already stored, that are worth storing.
_LEAST_TOKENS = 16
_POINTER = struct.Struct("<16sQ")  # key of the record of a sequence, and its size
_SIZE = struct.Struct("<Q")  # bytes of the KV, before the tokens


class _Record(NamedTuple):
    """A stored sequence: the key of its record, its tokens, and the size of its KV in bytes."""

    key: bytes
    tokens: array[int]
    num_bytes: int


class StoredSequences:
    """Connects the store of one engine with the sequences of its backend. Only one thread may call the methods, except
    for `counts`."""

    def __init__(self, store: BlockStore, states: SequenceStates, block_size: int) -> None:
        self._store, self._states, self._block_size = store, states, block_size
        self.num_restored_tokens = 0

    @staticmethod
    def over(store: BlockStore | None, executor: Executor, block_size: int) -> StoredSequences | None:
        """Return the stored sequences of an executor; None if there is no store, or if the executor gives no access to
        its sequences."""
        states = find_sequence_states(executor)
        return None if store is None or states is None else StoredSequences(store, states, block_size)

    # -- writing -----------------------------------------------------------------------------------------

    def end(self, seq: Sequence) -> None:
        """Store the KV of a sequence that has ended, unless most of it is already stored."""
        tokens = array("i", seq.tokens[: seq.kv.num_computed])
        hashes = list(self._hashes(seq, len(tokens)))
        num_stored = next((number for number in range(len(hashes), 0, -1) if self._follow(hashes[number - 1])), 0)
        new = hashes[num_stored:] if self._states.is_cuttable else hashes[-1:]
        if not _is_plain(seq) or (len(hashes) - num_stored) * self._block_size < _LEAST_TOKENS:
            return
        size = self._states.size_of(seq.id, len(tokens))
        if size and self._store.has_room(size):
            self._write(seq, tokens, self._states.read(seq.id), new)

    def _write(self, seq: Sequence, tokens: array[int], state: Buffer, ends: list[bytes]) -> None:
        """Offer a sequence to the store. The pieces of the sequence come first, so that each pointer has a target."""
        tenant, data = tenant_tag(seq.request.tenant), memoryview(state)
        key = blake2b(ends[-1] + tokens.tobytes(), digest_size=16, person=b"bridle-kv-seq").digest()
        record = _SIZE.pack(len(data)) + tokens.tobytes()
        pointer = _POINTER.pack(key, len(record))
        parts: list[tuple[bytes, Buffer]] = [(_piece(key, at), part) for at, part in _pieces(data)]
        parts += [(key, record), *((_pointer(digest), pointer) for digest in ends)]
        for name, part in parts:
            if not self._store.offer(name, tenant, len(part), partial(as_it_is, part)):
                return

    # -- reading -----------------------------------------------------------------------------------------

    def free(self, seq_ids: list[int]) -> None:
        """Let the backend delete sequences that have ended."""
        self._states.free(seq_ids)

    def begin(self, seq: Sequence) -> int:
        """Begin an admitted sequence in the backend with stored KV, for as many of its first tokens as possible.
        Returns the number of tokens for which stored KV was found."""
        if not _is_plain(seq) or seq.kv.num_mirrored_tokens:
            return 0
        for digest in reversed(list(self._hashes(seq, seq.max_reusable))):
            if (record := self._follow(digest)) is not None and (length := self._num_usable(seq, record)):
                return self._adopt(seq, record, length)
        return 0

    def _num_usable(self, seq: Sequence, record: _Record) -> int:
        pairs = zip(record.tokens, seq.tokens[: seq.max_reusable], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return common if self._states.is_cuttable or common == len(record.tokens) else 0

    def _adopt(self, seq: Sequence, record: _Record, length: int) -> int:
        state = memoryview(bytearray(record.num_bytes))
        for at, part in _pieces(state):
            fill = partial(part.__setitem__, slice(None))
            if not self._store.read(LoadedBlock(_piece(record.key, at), len(part), fill)):
                self._store.store.drop(record.key)  # so that the sequence is stored again
                return 0
        tokens = seq.tokens[:length]
        if not self._states.adopt(seq.id, seq.request.adapter, tokens, state):
            return 0
        self.num_restored_tokens += length
        self._store.read_bytes += record.num_bytes
        return length

    def _follow(self, digest: bytes) -> _Record | None:
        """Return the record that the pointer at the end of a block points to, or None. A pointer to a missing record is
        removed."""
        name = _pointer(digest)
        pointer = self._read(name, _POINTER.size)
        if pointer is None:
            return None
        key, size = _POINTER.unpack(pointer)
        record = self._read(key, size)
        if record is None:
            self._store.store.drop(name)
            return None
        (num_bytes,) = _SIZE.unpack_from(record)
        return _Record(key, array("i", bytes(record[_SIZE.size :])), num_bytes)

    def _read(self, key: bytes, size: int) -> bytes | None:
        found: list[bytes] = []
        block = LoadedBlock(key, size, lambda data: found.append(bytes(data)))
        return found[0] if self._store.has(key) and self._store.read(block) else None

    def _hashes(self, seq: Sequence, num_tokens: int) -> Iterator[bytes]:
        """Yield the hash at the end of each block of the first `num_tokens` tokens."""
        request, size = seq.request, self._block_size
        digest = root_hash(self._store.store.root, request.adapter or "", request.tenant)
        for start in range(0, num_tokens // size * size, size):
            digest = block_hash(digest, seq.tokens[start : start + size])
            yield digest

    # -- statistics and shutdown -------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads of the store after all offered entries are written."""
        self._store.close()

    def counts(self) -> dict[str, int]:
        """Return the counters for the engine's statistics. Safe from any thread."""
        return {"num_restored_tokens": self.num_restored_tokens, **self._store.counts()}


def _is_plain(seq: Sequence) -> bool:
    """Return whether the tokens and the adapter of a sequence determine its KV."""
    return not seq.runs and seq.vectors is None


def _pieces(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the pieces of the KV, each with the position where it begins."""
    for at in range(0, len(data), PIECE_BYTES):
        yield at, data[at : at + PIECE_BYTES]


def _piece(key: bytes, at: int) -> bytes:
    return blake2b(key + at.to_bytes(8, "little"), digest_size=16, person=b"bridle-kv-piece").digest()


def _pointer(digest: bytes) -> bytes:
    return blake2b(digest, digest_size=16, person=b"bridle-kv-end").digest()
