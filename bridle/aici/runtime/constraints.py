"""Host functions of module `bridle` for constraints, which guests refer to by handles.

A guest passes a constraint once and gets a small number as its handle. The constraint may be of any kind in
`bridle.structured_output`, such as a regex, a JSON schema or a grammar. The host computes the masks, so guests need no
memory for a grammar engine or masks. A fork copies handles together with the rest of the instance.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bridle.aici.runtime.host import BLOB_EXTRA
from bridle.aici.runtime.scored_choices import add_options, advance_choice, note_choice, parse_spec
from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.aici.runtime.wasm import GuestFault, HostFunction
from bridle.errors import InvalidRequest
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.limits import PARSER_LIMITS
from bridle.structured_output.vocabulary import GrammarVocabulary as TokenVocabulary
from bridle.structured_output.vocabulary import load_llguidance

if TYPE_CHECKING:
    from bridle.aici.runtime.instance import Instance

_ACCEPTS, _STOPPED, _FAILED = 1, 2, 4


def constraint_new(guest: Instance, kind: int, kind_length: int, spec: int, spec_length: int) -> int:
    """Create a constraint. Returns the constraint's handle, a number from 1. An invalid specification also gets a
    handle, whose status is failed; `constraint_error` returns the reason. So a script can raise its own exception."""
    limits = guest.surroundings.limits
    if len(guest.constraints) >= limits.max_constraints:
        raise GuestFault(
            f"the controller has more than {limits.max_constraints} constraints at the same time, the limit"
        )
    if spec_length > limits.max_constraint_spec or kind_length > 64:
        raise GuestFault(f"the constraint has {spec_length} bytes; at most {limits.max_constraint_spec}")
    name = guest.memory.read(kind, kind_length).decode(errors="replace")
    text = guest.memory.read(spec, spec_length).decode(errors="replace")
    handle = guest.next_constraint = guest.next_constraint + 1
    guest.constraints[handle] = make_matcher(guest.surroundings.vocabulary, name, text)
    note_choice(guest, handle, name, text)
    return handle


def constraint_allow(guest: Instance, handle: int) -> int:
    """Return the mask of the allowed next tokens, like `aici_host_return_logit_bias`. If the constraint is a choice of
    whole texts, these texts are passed to the engine too."""
    return add_options(guest, handle, guest.add_mask(_bits(guest, handle)))


def constraint_mask(guest: Instance, handle: int) -> int:
    """Return a blob with the constraint's mask as bits, for a guest that reads masks."""
    guest.blobs[BLOB_EXTRA] = _bits(guest, handle)
    return BLOB_EXTRA


def constraint_commit(guest: Instance, handle: int, source: int, count: int) -> int:
    """Advance the constraint by u32 tokens. Returns the number of accepted tokens."""
    if count > guest.surroundings.limits.max_forced_tokens:
        raise GuestFault(
            f"{count} tokens were given to a constraint; at most {guest.surroundings.limits.max_forced_tokens}"
        )
    tokens = struct.unpack(f"<{count}I", guest.memory.read(source, 4 * count))
    size = guest.surroundings.vocabulary.size
    if any(token >= size for token in tokens):
        raise GuestFault(f"token {max(tokens)} is outside the vocabulary of {size} tokens")
    accepted = int(_matcher(guest, handle).try_consume_tokens(list(tokens)))
    advance_choice(guest, handle, tokens[:accepted])
    return accepted


def constraint_rollback(guest: Instance, handle: int, count: int) -> int:
    """Roll back the constraint's last tokens. Returns 1 if the rollback was possible. After a rollback, the texts of a
    choice are no longer passed to the engine."""
    guest.choices.pop(handle, None)
    return int(_matcher(guest, handle).rollback(count))


def constraint_ff(guest: Instance, handle: int) -> int:
    """Return a blob with the u32 tokens that must come next."""
    tokens = _matcher(guest, handle).compute_ff_tokens()
    guest.blobs[BLOB_EXTRA] = struct.pack(f"<{len(tokens)}I", *tokens)
    return BLOB_EXTRA


def constraint_status(guest: Instance, handle: int) -> int:
    """Return the constraint's status as bits: 1 if the text may end here, 2 if nothing may follow, 4 if it failed."""
    matcher = _matcher(guest, handle)
    if matcher.is_error():
        return _FAILED | _STOPPED
    return (_ACCEPTS if matcher.is_accepting() else 0) | (_STOPPED if matcher.is_stopped() else 0)


def constraint_error(guest: Instance, handle: int) -> int:
    """Return a blob with the constraint's error text."""
    guest.blobs[BLOB_EXTRA] = _matcher(guest, handle).get_error().encode()
    return BLOB_EXTRA


def constraint_free(guest: Instance, handle: int) -> int:
    """Drop a constraint's handle. Returns 1 if the handle existed."""
    guest.choices.pop(handle, None)
    return int(guest.constraints.pop(handle, None) is not None)


def _bits(guest: Instance, handle: int) -> bytes:
    mask: bytes = _matcher(guest, handle).compute_bitmask()
    size = 4 * ((guest.surroundings.vocabulary.size + 31) // 32)
    return mask[:size].ljust(size, b"\0")


def _matcher(guest: Instance, handle: int) -> Any:
    matcher = guest.constraints.get(handle)
    if matcher is None:
        raise GuestFault(f"unknown constraint {handle}")
    return matcher


def make_matcher(vocabulary: RuntimeVocabulary, kind: str, spec: str) -> Any:
    """Return an llguidance matcher at its start; a `_Refused` if the specification is invalid."""
    try:
        grammar = grammar_of(parse_spec(kind, spec))
    except InvalidRequest as error:
        return _Refused(str(error))
    llguidance = load_llguidance()
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    return llguidance.LLMatcher(_tokenizer(vocabulary), grammar, log_level=0, limits=limits)


class _Refused:
    """Substitute for the matcher of an invalid specification: it allows no token, and has the error."""

    def __init__(self, error: str) -> None:
        self._error = error

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return self._error

    def is_stopped(self) -> bool:
        return True

    def is_accepting(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        return b""

    def compute_ff_tokens(self) -> list[int]:
        return []

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0

    def rollback(self, count: int) -> bool:
        return False

    def deep_copy(self) -> _Refused:
        return self


def _tokenizer(vocabulary: RuntimeVocabulary) -> Any:
    """Return the vocabulary as an llguidance tokenizer. The tokenizer is created once per vocabulary, because creating
    it takes a moment."""
    if vocabulary.llguidance is None:
        tokens = TokenVocabulary(vocabulary.tokens, (vocabulary.eos,), vocabulary.special, vocabulary.encode)
        vocabulary.llguidance = tokens.backend
    return vocabulary.llguidance


def _bridle(name: str, params: str, function: Callable[..., int | None]) -> HostFunction:
    return HostFunction("bridle", name, params, True, function)


FUNCTIONS = (
    _bridle("constraint_new", "iiii", constraint_new),
    _bridle("constraint_allow", "i", constraint_allow),
    _bridle("constraint_mask", "i", constraint_mask),
    _bridle("constraint_commit", "iii", constraint_commit),
    _bridle("constraint_rollback", "ii", constraint_rollback),
    _bridle("constraint_ff", "i", constraint_ff),
    _bridle("constraint_status", "i", constraint_status),
    _bridle("constraint_error", "i", constraint_error),
    _bridle("constraint_free", "i", constraint_free),
)
