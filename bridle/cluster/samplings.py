"""Sampling parameters on the wire: each object is sent once and is then named by a slot.

The sender assigns the slots. A new object takes the slot that was not used for the longest time, and replaces what the
receiver had there. Only fields that choose a token are sent; a shard does not decide when an output is complete. Each
field of `SamplingParams` is either sent or named in `UNSENT`; a test sends each of them.
"""

from __future__ import annotations

from collections import OrderedDict

from bridle.cluster.proto import shard_pb2 as pb
from bridle.errors import InvalidRequest, ProtocolError
from bridle.sampling import SamplingParams, Watermark

#: How many objects are remembered. One batch may need more, and gets them.
NUM_SLOTS = 4096
#: Fields that a shard does not need: how many outputs there are, when each is complete, what the client is told of it,
#: and what the rows of a step already say (their keys come from the seed, and the scores of a prompt are rows of their
#: own).
UNSENT = frozenset(
    {
        "n",
        "max_tokens",
        "min_tokens",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "prompt_logprobs",
        "prompt_logprobs_start",
        "skip_special_tokens",
    }
)
#: The largest number of slots that a receiver allows a sender.
MAX_SLOTS = 1 << 16


class SamplingNames:
    """The sender's side: gives each object a slot, and collects the objects that must be sent first.

    Objects are compared by identity. This is fast, and correct because they are immutable and kept alive here.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self._num_slots = num_slots
        self._known: OrderedDict[int, tuple[int, SamplingParams]] = OrderedDict()  # by id: slot, object

    def name(self, samplings: list[SamplingParams]) -> tuple[list[int], list[pb.Sampling]]:
        """The slot of each object, and the messages for objects that the receiver does not know yet."""
        self._num_slots = max(self._num_slots, len(samplings))  # none of these may push out another
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
    """The receiver's side: the objects by slot."""

    def __init__(self) -> None:
        self._slots: dict[int, SamplingParams] = {}

    def learn(self, message: pb.Sampling) -> None:
        """Remember the object of a message. Raises `ProtocolError` if its slot or its values are not allowed."""
        if message.slot >= MAX_SLOTS:
            raise ProtocolError(f"sampling slot {message.slot} is named; there are {MAX_SLOTS}")
        self._slots[message.slot] = decode_sampling(message)

    def get(self, slot: int) -> SamplingParams:
        """What was sent for `slot`."""
        try:
            return self._slots[slot]
        except KeyError:
            raise ProtocolError(f"sampling slot {slot} was never filled") from None


def encode_sampling(sampling: SamplingParams, slot: int) -> pb.Sampling:
    """The fields that choose a token, as a message."""
    mark = sampling.watermark
    return pb.Sampling(
        slot=slot,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias_tokens=sampling.logit_bias.keys(),
        bias_values=sampling.logit_bias.values(),
        logprobs=sampling.logprobs,
        processed_logprobs=sampling.logprobs_mode == "processed",
        watermark=None if mark is None else pb.Watermark(gamma=mark.gamma, delta=mark.delta),
    )


def decode_sampling(message: pb.Sampling) -> SamplingParams:
    """The object that the message describes, checked as if a client had sent it."""
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            typical_p=message.typical_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(zip(message.bias_tokens, message.bias_values, strict=True)),
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            logprobs_mode="processed" if message.processed_logprobs else "raw",
            watermark=_watermark(message),
        )
    except (InvalidRequest, ValueError) as error:
        raise ProtocolError(f"sampling slot {message.slot}: {error}") from error


def _watermark(message: pb.Sampling) -> Watermark | None:
    mark = message.watermark
    return Watermark(mark.gamma, mark.delta) if message.HasField("watermark") else None
