"""Encodes embedding vectors for shards, as packed 32-bit floats, without loss."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from bridle.distributed.address import MAX_MESSAGE_BYTES
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.interfaces import Embedder, Executor
from bridle.errors import ProtocolError, UnsupportedFeature

_NUMBER_BYTES = 4
#: Maximum number of values in one message. More vectors are fetched in several messages.
MAX_NUMBERS = MAX_MESSAGE_BYTES // (2 * _NUMBER_BYTES)


def require_embedder(executor: Executor) -> Embedder:
    """Return the executor, which must support embeddings. Raises `UnsupportedFeature` otherwise."""
    if isinstance(executor, Embedder) and executor.info.embedding_size:
        return executor
    raise UnsupportedFeature("this server computes no embeddings with this model", "model")


def answer_embed(executor: Executor, message: pb.Embed) -> pb.Vectors:
    """Compute the embedding vectors that `message` requests. Raises `ProtocolError` if the vectors do not fit into one
    message."""
    embedder, size = require_embedder(executor), executor.info.embedding_size
    num_rows = len(message.logits_rows)
    if num_rows * size > MAX_NUMBERS:
        raise ProtocolError(
            f"a message asks for {num_rows} embeddings of {size} values; at most {MAX_NUMBERS} values in all"
        )
    return encode_vectors(message.step, size, embedder.embed(message.step, list(message.logits_rows)))


def encode_vectors(step: int, size: int, vectors: Sequence[array[float]]) -> pb.Vectors:
    """Encode embedding vectors, each of `size` numbers, as one message."""
    return pb.Vectors(step=step, size=size, values=b"".join([_swapped(vector).tobytes() for vector in vectors]))


def decode_vectors(message: pb.Vectors, num_rows: int, size: int) -> list[array[float]]:
    """Decode embedding vectors. Raises `ProtocolError` unless the message has `num_rows` vectors of `size` numbers."""
    num_bytes = _NUMBER_BYTES * size
    if message.size != size or len(message.values) != num_rows * num_bytes:
        raise ProtocolError(
            f"embeddings of step {message.step}: got {len(message.values)} bytes of embeddings with {message.size} "
            f"values each; expected {num_rows} embeddings with {size} values"
        )
    values = message.values
    return [_swapped(array("f", values[at : at + num_bytes])) for at in range(0, len(values), num_bytes)]


def _swapped(vector: array[float]) -> array[float]:
    """Convert a vector between this machine's byte order and the message's byte order, in either direction."""
    if sys.byteorder == "little":
        return vector
    swapped = array("f", vector)
    swapped.byteswap()
    return swapped
