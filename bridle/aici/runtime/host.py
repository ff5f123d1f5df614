"""The functions that guests may import from `env`: AICI's own host interface, for both dialects.

A blob is a byte string in the host, which the guest copies in pieces. Every pointer is checked, and every size that a
guest may choose is limited. A guest's mistake raises `GuestFault`, which ends only that guest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from bridle.aici.replies import WriteVar
from bridle.aici.runtime.storage import parse_command
from bridle.aici.runtime.wasm import GuestFault, HostFunction
from bridle.errors import ControllerTrap

if TYPE_CHECKING:
    from bridle.aici.runtime.instance import Instance

BLOB_ARGUMENT, BLOB_TOKENIZED, BLOB_TOKENS, BLOB_PROCESS, BLOB_STORAGE, BLOB_EXTRA = 1, 2, 3, 4, 5, 6
BLOB_TRIE = 100
_KNOWN_BLOBS = 20


def read_blob(guest: Instance, blob: int, target: int, size: int) -> int:
    """Copy up to `size` bytes of a blob to the guest. Returns the blob's whole length."""
    data = _blob(guest, blob)
    if size:
        piece = memoryview(data)[:size]
        guest.memory.write(target, piece)
    return len(data)


def _blob(guest: Instance, blob: int) -> bytes:
    if blob == BLOB_TRIE:
        return guest.surroundings.vocabulary.trie(guest.layout)
    if blob == BLOB_PROCESS:
        return guest.process_argument
    if blob == BLOB_ARGUMENT:
        return guest.argument
    if blob >= _KNOWN_BLOBS:
        raise GuestFault(f"unknown blob {blob}")
    return guest.blobs.get(blob, b"")


def module_argument(guest: Instance) -> int:
    return BLOB_ARGUMENT


def process_argument(guest: Instance) -> int:
    return BLOB_PROCESS


def token_trie(guest: Instance) -> int:
    return BLOB_TRIE


def tokens(guest: Instance) -> int:
    return BLOB_TOKENS


def tokenize(guest: Instance, source: int, length: int) -> int:
    """Tokenize bytes into a blob of u32 ids. A failure gives an empty blob and a line in the log."""
    limits = guest.surroundings.limits
    guest.spent_tokenizing += length
    if length > limits.max_tokenize or guest.spent_tokenizing > limits.max_tokenize_total:
        raise GuestFault(
            f"this callback tokenizes {guest.spent_tokenizing} bytes, {length} of them in this call; at most "
            f"{limits.max_tokenize_total} in a callback and {limits.max_tokenize} in one call"
        )
    data = guest.memory.read(source, length)
    try:
        ids = guest.surroundings.vocabulary.tokenize(data, guest.dialect)
    except Exception as error:
        guest.log.write(f"warning: tokenization failed: {error}\n".encode())
        ids = []
    guest.blobs[BLOB_TOKENIZED] = struct.pack(f"<{len(ids)}I", *ids)
    return BLOB_TOKENIZED


def return_logit_bias(guest: Instance, source: int) -> int:
    """Keep a mask, given as one bit per token. Returns the number by which a dialect-2 result refers to the mask."""
    words = (guest.surroundings.vocabulary.size + 31) // 32
    return guest.add_mask(guest.memory.read(source, 4 * words))


def _return_logit_bias_old(guest: Instance, source: int) -> None:
    return_logit_bias(guest, source)


def self_seq_id(guest: Instance) -> int:
    return guest.seq_id


def return_process_result(guest: Instance, source: int, length: int) -> None:
    """Keep the JSON result of the running callback. If a callback stores several results, the last one counts."""
    limit = guest.surroundings.limits.max_result
    if length > limit:
        raise GuestFault(f"the result has {length} bytes; at most {limit}")
    guest.result = guest.memory.read(source, length)


def storage_command(guest: Instance, source: int, length: int) -> int:
    """Execute a command on the shared variables of the request."""
    limits = guest.surroundings.limits
    guest.num_commands += 1
    if guest.num_commands > limits.max_storage_commands:
        raise GuestFault(f"the callback ran more than {limits.max_storage_commands} storage commands, the limit")
    if length > 2 * limits.max_variable_bytes + 4096:
        raise GuestFault(f"a storage command has {length} bytes; at most {2 * limits.max_variable_bytes + 4096}")
    command = parse_command(guest.memory.read(source, length))
    guest.blobs[BLOB_STORAGE] = guest.variables.execute(command)
    if isinstance(command, WriteVar):
        guest.writes.append(command)
    return BLOB_STORAGE


def eos_token(guest: Instance) -> int:
    return guest.surroundings.vocabulary.eos


def get_config(guest: Instance, source: int, length: int) -> int:
    """Return whether the engine has a capability: `fork`, `backtrack`, `ff_tokens`, `when_sampled` (splices that
    depend on the sampled token)."""
    if length > 1024:
        raise GuestFault(f"the name of a configuration value has {length} bytes; at most 1024")
    name = guest.memory.read(source, length).decode(errors="replace")
    return int(name in guest.surroundings.capabilities)


def stop(guest: Instance) -> None:
    raise ControllerTrap("*** aici_host_stop()")


def _env(name: str, params: str, has_result: bool, function: Callable[..., int | None]) -> HostFunction:
    return HostFunction("env", f"aici_host_{name}", params, has_result, function)


FUNCTIONS = (
    _env("read_blob", "iii", True, read_blob),
    _env("module_arg", "", True, module_argument),
    _env("process_arg", "", True, process_argument),
    _env("token_trie", "", True, token_trie),
    _env("tokens", "", True, tokens),
    _env("tokenize", "ii", True, tokenize),
    _env("self_seq_id", "", True, self_seq_id),
    _env("return_process_result", "ii", False, return_process_result),
    _env("storage_cmd", "ii", True, storage_command),
    _env("eos_token", "", True, eos_token),
    _env("get_config", "ii", True, get_config),
    _env("stop", "", False, stop),
)
#: The import whose type distinguishes D1 and D2.0 guests (old) from later ones (new).
BIAS_OLD = _env("return_logit_bias", "i", False, _return_logit_bias_old)
BIAS_NEW = _env("return_logit_bias", "i", True, return_logit_bias)
