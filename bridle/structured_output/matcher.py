"""The state of a constraint on one output: which tokens may come next, which tokens are forced, and whether the text
may end.

Copying a matcher and rolling it back cost microseconds. A matcher is used by one thread at a time; different matchers
are independent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bridle.errors import ControllerError, InvalidRequest
from bridle.structured_output.bit_rows import allowed_tokens, is_empty
from bridle.structured_output.compile_worker import byte_tokenizer, reason
from bridle.structured_output.limits import PARSER_LIMITS
from bridle.structured_output.remembered import State
from bridle.structured_output.spec import Constraint
from bridle.structured_output.vocabulary import GrammarVocabulary

#: Maximum number of characters of a text, and of characters that may follow, in an explanation.
_MAX_SHOWN = 120
#: Words of llguidance's errors about its limits. The text could continue if the limit were higher.
_LIMIT_WORDS = re.compile(r"\bmax is\b|\btoo many\b|\blimit\b", re.IGNORECASE)
#: Maximum number of tokens after which masks are remembered, because longer texts seldom recur.
_MAX_REMEMBERED = 48
#: Maximum number of characters of a grammar whose masks are remembered, because the grammar's text is kept with them.
MAX_GRAMMAR = 1 << 16


class Matcher:
    """The state of a constraint on one output, initially before the first token. Raises `InvalidRequest` for a grammar
    that llguidance refuses. `compile_sandbox` must have tested before that compiling the grammar is harmless."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str) -> None:
        import llguidance

        self.vocabulary = vocabulary
        self._grammar = grammar
        self._tokens: list[int] = []
        limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        self.backend: Any = llguidance.LLMatcher(vocabulary.backend, grammar, log_level=0, limits=limits)
        if self.backend.is_error():
            message = f"the constraint's grammar is not usable: {reason(self.backend)}"
            raise InvalidRequest(message, "constraint")

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        twin: Matcher = object.__new__(Matcher)
        twin.vocabulary, twin._grammar = self.vocabulary, self._grammar
        twin._tokens, twin.backend = self._tokens.copy(), self.backend.deep_copy()
        return twin

    # -- advancing and rolling back ------------------------------------------------------------------------

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that were appended. Raises `ControllerError` at the first token that the grammar does not
        allow, or that exceeds its limits; then the matcher is unusable."""
        if not tokens:
            return
        count = self.backend.try_consume_tokens(list(tokens))
        self._tokens.extend(tokens[:count])
        if count < len(tokens):
            self._check_limits()
            token, text = self.vocabulary.text_of(tokens[count : count + 1]), self.vocabulary.text_of(self._tokens)
            raise ControllerError(
                f"token {tokens[count]} ({_shown(token)}) does not continue the constrained text {_shown(text)}"
            )

    def rollback(self, num_tokens: int) -> None:
        """Roll back the last tokens. Raises `ControllerError` if the matcher has fewer tokens."""
        if num_tokens == 0:
            return
        if num_tokens > len(self._tokens) or not self.backend.rollback(num_tokens):
            raise ControllerError(
                f"{num_tokens} tokens cannot be rolled back; the constraint has read {len(self._tokens)}"
            )
        del self._tokens[len(self._tokens) - num_tokens :]

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` the grammar allows one after the other."""
        return int(self.backend.validate_tokens(list(tokens)))

    def take(self, data: bytes) -> bool:
        """Advance by bytes. Returns whether the grammar allows all of the bytes."""
        known = self.vocabulary.byte_tokens
        tokens = [known[byte] for byte in data if byte in known]
        if len(tokens) < len(data):
            return False
        count = int(self.backend.try_consume_tokens(tokens)) if tokens else 0
        self._tokens.extend(tokens[:count])
        return count == len(tokens)

    # -- inspecting ----------------------------------------------------------------------------------------

    def forced_bytes(self) -> bytes:
        """Return the bytes that the grammar forces to come next."""
        return bytes(self.backend.compute_ff_bytes())

    def next_bytes(self, mask: bytes) -> frozenset[int]:
        """Return the bytes that may come next under `mask`."""
        known = self.vocabulary.byte_tokens
        return frozenset(byte for byte, token in known.items() if mask[token >> 3] >> (token & 7) & 1)

    def tail(self, size: int) -> bytes:
        """Return the last bytes of the text: at least `size`, or the whole text if it is shorter."""
        return self.vocabulary.text_of(self._tokens[-size:]) if size else b""

    @property
    def state(self) -> State | None:
        """Return the matcher's state as a key for cached masks; None for a state with a long text or grammar."""
        is_short = len(self._tokens) <= _MAX_REMEMBERED and len(self._grammar) <= MAX_GRAMMAR
        return (self._grammar, tuple(self._tokens)) if is_short else None

    def mask(self) -> bytes:
        """Return the mask of tokens that may come next, with one bit per token. End tokens are included if the text may
        end here. If no token may come next, raises `ControllerError` with an explanation."""
        state = self.state
        if state is None or self.is_failed:
            return self.compute_mask()
        known = self.vocabulary.masks.get(state)
        if known is None:
            known = self.vocabulary.masks[state] = self.compute_mask()
        return known

    def compute_mask(self) -> bytes:
        """Compute the result of `mask` without using cached masks."""
        row: bytes = self.backend.compute_bitmask()
        if not self.vocabulary.spells_every_byte:
            row = self._spellable(row)
        self._check_limits()
        if self.backend.is_error() or (is_empty(row) and not self.is_accepting):
            raise ControllerError(f"no token can continue the constrained text: {self.explain()}")
        size = self.vocabulary.mask_bytes
        return row if len(row) == size and not self.vocabulary.size % 32 else self._fitted(row, size)

    def must_end(self, mask: bytes) -> bool:
        """Return whether `mask` allows nothing but the end of the text."""
        return mask == self.vocabulary.end_row or (self.is_accepting and is_empty(mask))

    def _spellable(self, row: bytes) -> bytes:
        """If the next bytes are certain, allow only tokens that agree with these bytes. llguidance looks beyond the
        forced bytes, and assumes that some token spells them."""
        must = self.backend.compute_ff_bytes()
        if not must:
            return row
        spelled = bytearray(len(row))
        for token in allowed_tokens(row):
            data = self.vocabulary.text_of((token,)) if token < len(self.vocabulary.tokens) else b""
            if data and (must.startswith(data) or data.startswith(must)):
                spelled[token >> 3] |= 1 << (token & 7)
        return bytes(spelled)

    def _fitted(self, row: bytes, size: int) -> bytes:
        """Return exactly `size` bytes of the mask, without bits beyond the vocabulary."""
        fitted = bytearray(row[:size].ljust(size, b"\0"))
        whole, rest = divmod(self.vocabulary.size, 8)
        if rest:
            fitted[whole] &= (1 << rest) - 1
            whole += 1
        fitted[whole:] = bytes(size - whole)
        return bytes(fitted)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next, spelled as the tokenizer would spell them; empty if several texts may
        follow."""
        tokens: list[int] = self.backend.compute_ff_tokens()
        if not tokens or self.backend.validate_tokens(tokens) < len(tokens):
            return ()
        return tuple(tokens)

    @property
    def is_accepting(self) -> bool:
        """Return whether the text may end here."""
        return bool(self.backend.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Return whether the text must end here."""
        return bool(self.backend.is_stopped()) and not self.backend.is_error()

    @property
    def is_failed(self) -> bool:
        """Return whether the grammar has failed: it reached a limit, or a token was committed that the grammar does not
        allow."""
        return bool(self.backend.is_error())

    @property
    def failure(self) -> str:
        """Return the reason why the matcher failed, in a few words."""
        return reason(self.backend)

    @property
    def last_token(self) -> int | None:
        """Return the last committed token, or None."""
        return self._tokens[-1] if self._tokens else None

    @property
    def num_tokens(self) -> int:
        """Return the number of committed tokens."""
        return len(self._tokens)

    # -- explaining ----------------------------------------------------------------------------------------

    def _check_limits(self) -> None:
        """If the matcher failed because it reached a limit, raise the error that names the limit."""
        if self.backend.is_error() and _LIMIT_WORDS.search(self.failure):
            text = _shown(self.vocabulary.text_of(self._tokens))
            why = self.failure.partition("; consider")[0]
            raise ControllerError(
                f"the constraint exceeds its limits after {text}: {why}; use "
                "alternatives that begin differently, or smaller counts"
            )

    def explain(self) -> str:
        """Return text for an error message: the text so far, what the grammar allowed next, and the problem."""
        text = self.vocabulary.text_of(self._tokens)
        parts = [f"after {_shown(text)} the grammar allows {_allowed_after(self._grammar, text)}"]
        if self.backend.is_error() and self.backend.stop_reason() not in ("NoExtensionBias", "NotStopped"):
            why = reason(self.backend)
            if why != "it allows no text at all":
                parts.append(why)
        return "; ".join(parts)


@contextmanager
def fitting(policy: str, constraint: Constraint | None) -> Iterator[None]:
    """Raise an error that names policy and constraint if the policy's replacement does not fit the constrained text.
    The constraint's own messages may contain text that the policy forbids, so only the constraint's type is
    reported."""
    try:
        yield
    except ControllerError as error:
        if not policy or constraint is None:
            raise
        raise ControllerError(
            f"constraint: got a {next(iter(constraint.to_dict()))}; the text that policy {policy} inserts "
            f"must fit it, but {error}. Allow the text in the constraint, or leave out what the policy replaces."
        ) from None


def _allowed_after(grammar: str, text: bytes) -> str:
    """Return the bytes that may follow `text`, as readable text."""
    import llguidance

    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    matcher = llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits)
    if matcher.try_consume_tokens(list(text)) < len(text):
        return "nothing"
    row = matcher.compute_bitmask()
    allowed = [] if matcher.is_error() else [byte for byte in range(256) if row[byte >> 3] >> (byte & 7) & 1]
    words = [_ranges(allowed)] if allowed else []
    if matcher.is_accepting():
        words.append("the end")
    return " or ".join(words) or "nothing"


def _ranges(values: Sequence[int]) -> str:
    """Return byte values as ranges of characters, such as `'0'-'9', '}'`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return _cut(", ".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in runs))


def _char(value: int) -> str:
    return repr(chr(value)) if 32 <= value < 127 else f"0x{value:02X}"


def _shown(data: bytes | Iterable[int]) -> str:
    """Return the end of the text `text`, in quotes."""
    text = repr(bytes(data).decode("utf-8", "replace"))
    return text if len(text) <= _MAX_SHOWN else "'..." + text[-_MAX_SHOWN:]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
