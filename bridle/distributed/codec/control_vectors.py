"""Encodes control vectors for shards: each vector's directions are sent once, and step plans refer to them by key.
Numbers are transferred exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bridle.distributed.codec.columns import check_lengths, item, shares
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.control.vector_scales import Probes, VectorSpan
from bridle.engine.interfaces import Executor
from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.errors import ProtocolError

if TYPE_CHECKING:
    from bridle.control_vectors import ControlVectors, Directions

_LAST_LAYER = -1
_NUMBER = "<f4"
_NUMBER_BYTES = 4


def find_vectors(executor: Executor) -> ControlVectors | None:
    """Return the control vectors of an executor; None if the executor does not support them."""
    return getattr(executor, "control_vectors", None)


class SentVectors:
    """Selects the control vectors to send to another process before a step plan that uses them."""

    def __init__(self, store: ControlVectors | None) -> None:
        self._store = store
        self._keys: set[str] = set()

    def messages(self, plan: StepPlan) -> Iterator[pb.StepRequest]:
        """Yield the messages to send before `plan`: new vectors, and removals of vectors that the store has dropped.
        Raises `InternalError` for a key that the store does not have."""
        store = self._store
        if store is None:
            return
        gone = {key for key in self._keys if key not in store}
        new = {key for row in plan.rows if row.vectors or row.probes for key in row.vector_keys} - self._keys
        for key in sorted(gone):
            yield pb.StepRequest(control_vector=pb.ControlVector(key=key))
        for key in sorted(new):
            yield pb.StepRequest(control_vector=encode_vector(key, store.held(key)))
        self._keys = (self._keys - gone) | new


def receive_vector(executor: Executor, message: pb.ControlVector) -> None:
    """Store or drop the control vector of a message. Raises `ProtocolError` if the vector does not fit the model."""
    store = find_vectors(executor)
    if store is None:
        raise ProtocolError(f"got control vector {message.key!r} for a model that applies no control vectors")
    if message.layers:
        store.hold(message.key, decode_vector(message, store.hidden_size))
    else:
        store.drop(message.key)


def forget_vectors(executor: Executor) -> None:
    """Drop all control vectors that were received."""
    store = find_vectors(executor)
    if store is not None:
        store.clear()


def encode_vector(key: str, directions: Directions) -> pb.ControlVector:
    """Encode the directions of the control vector `key`."""
    values = [direction.float().contiguous().numpy().astype(_NUMBER).tobytes() for direction in directions.values()]
    return pb.ControlVector(key=key, layers=directions, values=b"".join(values))


def decode_vector(message: pb.ControlVector, hidden_size: int) -> Directions:
    """Decode a control vector's directions. Raises `ProtocolError` unless each direction has `hidden_size` numbers."""
    import numpy as np
    import torch

    layers, num_bytes = list(message.layers), len(message.values)
    if num_bytes != len(layers) * hidden_size * _NUMBER_BYTES:
        raise ProtocolError(
            f"control vector {message.key!r} has {num_bytes} bytes; this is not the size of {len(layers)} layers of "
            f"{hidden_size} values"
        )
    rows = torch.from_numpy(np.frombuffer(message.values, _NUMBER).astype(np.float32)).view(len(layers), hidden_size)
    return dict(zip(layers, rows, strict=True))


def add_vectors(message: pb.Plan, rows: Sequence[PlanRow]) -> None:
    """Add the control vectors and probes of the batch rows to a plan's message."""
    numbers = {key: number for number, key in enumerate(sorted(set().union(*(row.vector_keys for row in rows))))}
    message.vector_keys.extend(numbers)
    for row in rows:
        message.num_spans.append(len(row.vectors))
        message.num_probes.append(len(row.probes))
        for span in row.vectors:
            message.span_offsets.append(span.offset)
            message.span_lengths.append(span.length)
            message.num_scales.append(len(span.mix))
            message.scale_vectors.extend(numbers[key] for key, _ in span.mix)
            message.scales.extend(scale for _, scale in span.mix)
        for key, layer in row.probes:
            message.probe_vectors.append(numbers[key])
            message.probe_layers.append(_LAST_LAYER if layer is None else layer)


def read_spans(message: pb.Plan, num_rows: int, what: str) -> Sequence[tuple[VectorSpan, ...]]:
    """Return the control vectors of each batch row of a plan. Raises `ProtocolError` if the columns have inconsistent
    lengths."""
    if not message.num_spans:
        return [()] * num_rows
    check_lengths(what, num_rows, message.num_spans)
    check_lengths(what, len(message.span_offsets), message.span_lengths, message.num_scales)
    check_lengths(what, len(message.scales), message.scale_vectors)
    keys = [item(message.vector_keys, number, what) for number in message.scale_vectors]
    mixes = shares(zip(keys, message.scales, strict=True), message.num_scales, what)
    spans = list(map(VectorSpan, message.span_offsets, message.span_lengths, mixes))
    return shares(spans, message.num_spans, what)


def read_probes(message: pb.Plan, num_rows: int, what: str) -> Sequence[Probes]:
    """Return the probes of each batch row of a plan. Raises `ProtocolError` if the columns have inconsistent
    lengths."""
    if not message.num_probes:
        return [()] * num_rows
    check_lengths(what, num_rows, message.num_probes)
    check_lengths(what, len(message.probe_vectors), message.probe_layers)
    keys = [item(message.vector_keys, number, what) for number in message.probe_vectors]
    layers = [None if layer == _LAST_LAYER else layer for layer in message.probe_layers]
    return shares(zip(keys, layers, strict=True), message.num_probes, what)
