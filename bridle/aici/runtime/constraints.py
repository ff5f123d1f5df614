"""Constraint handles for guests: our addition to the host interface, imports of module `bridle`.

A guest names a regex, JSON schema, Lark grammar, substring or choice once and gets a small number; the masks are
computed by llguidance on the host's side, so neither a grammar engine nor masks need room in guest memory. A fork
copies handles with everything else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from bridle.aici.runtime.host import BLOB_EXTRA
from bridle.aici.runtime.vocabulary import Vocabulary
from bridle.aici.runtime.wasm import GuestFault, HostFunction
from bridle.errors import UnsupportedFeature

if TYPE_CHECKING:
    from bridle.aici.runtime.instance import Instance

_ACCEPTS, _STOPPED, _FAILED = 1, 2, 4


def constraint_new(guest: Instance, kind: int, kind_length: int, spec: int, spec_length: int) -> int:
    """A handle, from 1. A specification that makes no sense gives a handle too: its status says that it failed
    and `constraint_error` why, so that a script can raise its own exception."""
    limits = guest.surroundings.limits
    if len(guest.constraints) >= limits.max_constraints:
        raise GuestFault(f"more than {limits.max_constraints} constraints at the same time")
    if spec_length > limits.max_constraint_spec or kind_length > 64:
        raise GuestFault(f"constraint of {spec_length} bytes exceeds the limit of {limits.max_constraint_spec}")
    name = guest.memory.read(kind, kind_length).decode(errors="replace")
    text = guest.memory.read(spec, spec_length).decode(errors="replace")
    handle = guest.next_constraint = guest.next_constraint + 1
    guest.constraints[handle] = make_matcher(guest.surroundings.vocabulary, name, text)
    return handle


def constraint_allow(guest: Instance, handle: int) -> int:
    """The mask of what may come next, as `aici_host_return_logit_bias` would name it."""
    mask: bytes = _matcher(guest, handle).compute_bitmask()
    size = 4 * ((guest.surroundings.vocabulary.size + 31) // 32)
    return guest.add_mask(mask[:size].ljust(size, b"\0"))


def constraint_commit(guest: Instance, handle: int, source: int, count: int) -> int:
    """Consume u32 tokens; gives how many were taken."""
    if count > guest.surroundings.limits.max_forced_tokens:
        raise GuestFault(f"{count} tokens exceed the limit of {guest.surroundings.limits.max_forced_tokens}")
    tokens = struct.unpack(f"<{count}I", guest.memory.read(source, 4 * count))
    size = guest.surroundings.vocabulary.size
    if any(token >= size for token in tokens):
        raise GuestFault(f"token {max(tokens)} is outside the vocabulary of {size}")
    return int(_matcher(guest, handle).try_consume_tokens(list(tokens)))


def constraint_rollback(guest: Instance, handle: int, count: int) -> int:
    """Take the last tokens back; 1 if that was possible."""
    return int(_matcher(guest, handle).rollback(count))


def constraint_ff(guest: Instance, handle: int) -> int:
    """A blob of the u32 tokens that must come next."""
    tokens = _matcher(guest, handle).compute_ff_tokens()
    guest.blobs[BLOB_EXTRA] = struct.pack(f"<{len(tokens)}I", *tokens)
    return BLOB_EXTRA


def constraint_status(guest: Instance, handle: int) -> int:
    """Bits: 1 the text may end here, 2 nothing may follow, 4 failed."""
    matcher = _matcher(guest, handle)
    if matcher.is_error():
        return _FAILED | _STOPPED
    return (_ACCEPTS if matcher.is_accepting() else 0) | (_STOPPED if matcher.is_stopped() else 0)


def constraint_error(guest: Instance, handle: int) -> int:
    """A blob with the text of what went wrong."""
    guest.blobs[BLOB_EXTRA] = _matcher(guest, handle).get_error().encode()
    return BLOB_EXTRA


def constraint_free(guest: Instance, handle: int) -> int:
    """Forget a handle; 1 if there was one."""
    return int(guest.constraints.pop(handle, None) is not None)


def _matcher(guest: Instance, handle: int) -> Any:
    matcher = guest.constraints.get(handle)
    if matcher is None:
        raise GuestFault(f"unknown constraint {handle}")
    return matcher


def make_matcher(vocabulary: Vocabulary, kind: str, spec: str) -> Any:
    """An llguidance matcher at its start."""
    llguidance = _llguidance()
    try:
        grammar = _grammar(llguidance.LLMatcher, kind, spec)
    except ValueError as error:
        raise GuestFault(f"constraint: {error}") from None
    return llguidance.LLMatcher(_tokenizer(vocabulary), grammar, log_level=0)


def _grammar(matcher: Any, kind: str, spec: str) -> str:
    if kind == "regex":
        return str(matcher.grammar_from_regex(spec))
    if kind == "json_schema":
        return str(matcher.grammar_from_json_schema(spec))
    if kind == "lark":
        return str(matcher.grammar_from_lark(spec))
    if kind == "substring":
        return str(matcher.grammar_from_lark(f'start: %regex {{"substring_words": {_quoted(spec)}}}'))
    if kind == "choice":
        options = msgspec.json.decode(spec, type=list[str])
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(_quoted, options))))
    raise GuestFault(f"unknown kind of constraint {kind!r}: regex, json_schema, lark, substring or choice")


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedFeature("constraint handles need the package llguidance") from None
    return llguidance


class _Wrapper:
    """A vocabulary as llguidance wants to see it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos
        self.bos_token_id = None
        self.tokens = [token or f"\xff<{i}>".encode("latin-1") for i, token in enumerate(vocabulary.tokens)]
        self.special_token_ids = sorted(vocabulary.special | {vocabulary.eos})
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text))


def _tokenizer(vocabulary: Vocabulary) -> Any:
    """Made once for a vocabulary, since it takes a moment."""
    if vocabulary.llguidance is None:
        llguidance = _llguidance()
        wrapper = llguidance.TokenizerWrapper(_Wrapper(vocabulary))
        vocabulary.llguidance = llguidance.LLTokenizer(wrapper)
    return vocabulary.llguidance


def _bridle(name: str, params: str, function: Callable[..., int | None]) -> HostFunction:
    return HostFunction("bridle", name, params, True, function)


FUNCTIONS = (
    _bridle("constraint_new", "iiii", constraint_new),
    _bridle("constraint_allow", "i", constraint_allow),
    _bridle("constraint_commit", "iii", constraint_commit),
    _bridle("constraint_rollback", "ii", constraint_rollback),
    _bridle("constraint_ff", "i", constraint_ff),
    _bridle("constraint_status", "i", constraint_status),
    _bridle("constraint_error", "i", constraint_error),
    _bridle("constraint_free", "i", constraint_free),
)
