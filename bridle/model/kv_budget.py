"""Computes the default size of a KV cache in bytes: the largest useful size for the model that fits into memory. The
functions only compute with sizes that callers pass. No function inspects the machine or allocates memory.
"""

from __future__ import annotations

from typing import NamedTuple

#: The maximum share of the free memory for a cache. Other programs need a CPU's memory, too.
SHARE = {"cpu": 0.5, "cuda": 0.95}
#: A cache holds at most `MOST_CONTEXTS` requests of the longest length, or one for each sequence if there are fewer
#: sequences. It holds at least `CACHED_CONTEXTS`, so that cached prefixes survive a few other requests.
MOST_CONTEXTS, CACHED_CONTEXTS = 64, 8
#: On a machine shared with other programs, a cache gets the free memory divided by this, unless the model needs more.
_MODEST = 16


class KVBudget(NamedTuple):
    """The bytes of a KV cache, and the reason for this size, for the log."""

    num_bytes: int
    reason: str


def choose_room(
    free: int,
    kind: str,
    *,
    context_bytes: int,
    weight_bytes: int,
    max_seqs: int,
    num_sharers: int = 1,
    most: int | None = None,
) -> KVBudget:
    """Return the KV budget of one process, if a device of this `kind` has `free` bytes for `num_sharers` processes. A
    request of the longest length takes `context_bytes`, the weights take `weight_bytes`, and at most `max_seqs`
    sequences run at once. `most` is the limit of this model's cache, a part of the operator's limit for all models."""
    share = SHARE.get(kind, SHARE["cpu"])
    contexts = min(MOST_CONTEXTS, max(max_seqs, CACHED_CONTEXTS))
    rooms = [
        KVBudget(contexts * context_bytes, f"all that {contexts} requests of the longest length take"),
        KVBudget(int(free * share) // num_sharers, f"{share:.0%} of what is free{_divided(num_sharers)}"),
    ]
    if kind != "cuda":
        rooms.append(_modest(free, context_bytes, weight_bytes, num_sharers))
    if most is not None:
        rooms.append(KVBudget(most, "its part of the memory for all models"))
    return min(rooms)


def _modest(free: int, context_bytes: int, weight_bytes: int, num_sharers: int) -> KVBudget:
    """Return the default budget on a machine shared with other programs. A small model on a large machine gets a part
    of the free memory. A large model gets as many bytes as its weights. In any case, one request of the maximum length
    fits if there is enough memory."""
    return max(
        KVBudget(context_bytes, "what one request of the longest length takes"),
        KVBudget(weight_bytes, "as much as the weights"),
        KVBudget(free // _MODEST // num_sharers, f"a sixteenth of what is free{_divided(num_sharers)}"),
    )


def _divided(num_sharers: int) -> str:
    return f", divided by {num_sharers}" if num_sharers > 1 else ""
