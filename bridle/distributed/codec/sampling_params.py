"""Encodes sampling parameters for shards: each object is sent once, and then referenced by the number of a slot.

The sender assigns the slots. A new object takes the least recently used slot, and replaces the receiver's object there.
Only fields that choose a token are sent; a shard does not decide when an output is complete. The metadata of each field
of `SamplingParams` says whether the field is sent; a test sends all of these fields.
"""

from __future__ import annotations

from collections import OrderedDict

from bridle.distributed.proto import shard_pb2 as pb
from bridle.errors import InvalidRequest, ProtocolError
from bridle.sampling import SENT_WITH_DRAWS, SamplingParams
from bridle.sampling_values import Watermark

#: Maximum number of objects in slots. A batch with more objects gets as many slots as it needs.
NUM_SLOTS = 4096
#: The largest number of slots that a receiver allows a sender.
MAX_SLOTS = 1 << 16


class SamplingNames:
    """The sender's slots: gives each `SamplingParams` object a slot, and collects objects that the receiver lacks.

    Objects are compared by identity, which is fast, and correct because the objects are immutable and this class keeps
    them alive.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self._num_slots = num_slots
        self._known: OrderedDict[int, tuple[int, SamplingParams]] = OrderedDict()  # by id: slot, object

    def name(self, samplings: list[SamplingParams]) -> tuple[list[int], list[pb.Sampling]]:
        """Return the slot of each object, and the messages for objects that the receiver does not have yet."""
        self._num_slots = max(self._num_slots, len(samplings))  # so that no object of this call replaces another
        known, slots, new = self._known, [], []
        for sampling in samplings:
            entry = known.get(id(sampling))
            if entry is None:
                entry = self._add(sampling)
                new.append(encode_sampling(sampling, entry[0]))
            else:
                known.move_to_end(id(sampling))
            slots.append(entry[0])
        return slots, new

    def _add(self, sampling: SamplingParams) -> tuple[int, SamplingParams]:
        slot = len(self._known)
        if slot >= self._num_slots:
            slot = self._known.popitem(last=False)[1][0]
        entry = self._known[id(sampling)] = slot, sampling
        return entry


class SamplingSlots:
    """The receiver's slots, with a `SamplingParams` object in each."""

    def __init__(self) -> None:
        self._slots: dict[int, SamplingParams] = {}

    def learn(self, message: pb.Sampling) -> None:
        """Store the object of a message in its slot. Raises `ProtocolError` if the slot or the values are not
        allowed."""
        if message.slot >= MAX_SLOTS:
            raise ProtocolError(f"sampling parameters for slot {message.slot}; slots go from 0 to {MAX_SLOTS - 1}")
        self._slots[message.slot] = decode_sampling(message)

    def get(self, slot: int) -> SamplingParams:
        """Return the parameters sent for `slot`."""
        try:
            return self._slots[slot]
        except KeyError:
            raise ProtocolError(f"a batch row uses sampling slot {slot}, which has no sampling parameters") from None


def encode_sampling(sampling: SamplingParams, slot: int) -> pb.Sampling:
    """Encode the fields that affect the choice of a token, and those that select the data reported about the token."""
    message = pb.Sampling(slot=slot, **{name: getattr(sampling, name) for name in _PLAIN})
    message.bias_tokens.extend(sampling.logit_bias.keys())
    message.bias_values.extend(sampling.logit_bias.values())
    message.processed_logprobs = sampling.logprobs_mode == "processed"
    if sampling.watermark is not None:
        message.watermark.CopyFrom(pb.Watermark(gamma=sampling.watermark.gamma, delta=sampling.watermark.delta))
    return message


def decode_sampling(message: pb.Sampling) -> SamplingParams:
    """Decode sampling parameters, with the same checks as for a client's values."""
    mark = message.watermark
    try:
        return SamplingParams(
            **{name: getattr(message, name) for name in _PLAIN if name not in _OPTIONAL or message.HasField(name)},
            logit_bias=dict(zip(message.bias_tokens, message.bias_values, strict=True)),
            logprobs_mode="processed" if message.processed_logprobs else "raw",
            watermark=Watermark(mark.gamma, mark.delta) if message.HasField("watermark") else None,
        )
    except (InvalidRequest, ValueError) as error:
        raise ProtocolError(f"sampling slot {message.slot}: {error}") from error


#: Fields that have another form on the wire.
_FORMED = frozenset({"logit_bias", "logprobs_mode", "watermark"})
#: All other fields are sent unchanged; fields without presence are always sent.
_PLAIN = tuple(name for name in SENT_WITH_DRAWS if name not in _FORMED)
_OPTIONAL = frozenset({"logprobs"})
