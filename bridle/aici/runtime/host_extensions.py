"""Host functions of module `bridle`, except those for constraints. These functions let guests look up tokens without a
copy of the token trie, fail with a message, and ask whether their time is up."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from bridle.aici.runtime import chat_prompt
from bridle.aici.runtime.host import BLOB_EXTRA
from bridle.aici.runtime.wasm import GuestFailed, GuestFault, HostFunction

if TYPE_CHECKING:
    from bridle.aici.runtime.instance import Instance

_MAX_FAILURE = 4096


def vocab_size(guest: Instance) -> int:
    """Return the vocabulary size; a mask has one bit for each token."""
    return guest.surroundings.vocabulary.size


def detokenize(guest: Instance, source: int, count: int) -> int:
    """Return a blob with the bytes of `count` u32 tokens, concatenated; special tokens have no bytes."""
    limit = guest.surroundings.limits.max_tokenize
    if 4 * count > limit:
        raise GuestFault(f"{count} tokens to detokenize; at most {limit // 4} in one call")
    tokens = guest.surroundings.vocabulary.tokens
    ids = struct.unpack(f"<{count}I", guest.memory.read(source, 4 * count))
    if any(token >= len(tokens) for token in ids):
        raise GuestFault(f"token {max(ids)} is outside the vocabulary of {len(tokens)} tokens")
    guest.blobs[BLOB_EXTRA] = b"".join(tokens[token] for token in ids)
    return BLOB_EXTRA


def render_chat(guest: Instance, source: int, length: int) -> int:
    """Return a blob with the prompt of a conversation, as JSON."""
    guest.blobs[BLOB_EXTRA] = chat_prompt.render_chat(guest, guest.memory.read(source, length))
    return BLOB_EXTRA


def fail(guest: Instance, source: int, length: int) -> None:
    """End the sequence with the guest's error text."""
    text = guest.memory.read(source, min(length, _MAX_FAILURE)).decode(errors="replace")
    raise GuestFailed(text or "the controller failed without a word")


def is_time_up(guest: Instance) -> int:
    """Return whether the guest is about to be interrupted. A guest that calls this function gets some extra time to
    report its position."""
    return int(guest.is_time_up())


FUNCTIONS = (
    HostFunction("bridle", "vocab_size", "", True, vocab_size),
    HostFunction("bridle", "detokenize", "ii", True, detokenize),
    HostFunction("bridle", "render_chat", "ii", True, render_chat),
    HostFunction("bridle", "is_time_up", "", True, is_time_up),
    HostFunction("bridle", "fail", "ii", False, fail),
)
