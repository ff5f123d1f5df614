"""Decides which tokens of a prompt are taken back for token healing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from bridle.engine.control.decision import mask_of
from bridle.engine.sampling.token_healing import TokenHealing
from bridle.errors import UnsupportedFeature
from bridle.structured_output.spec import Concat, Constraint
from bridle.tokenizer import Tokenizer

#: The most tokens that are taken back, and the most bytes of their text.
MAX_HEALED_TOKENS = 4
MAX_HEALED_BYTES = 32

Tokens = tuple[int, ...]


class _Pieces:
    """The bytes of a tokenizer's ordinary tokens, sorted, so that those with a given beginning stand together."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = frozenset(tokenizer.special_token_ids) | frozenset(tokenizer.eos_token_ids)
        ids = (token for token in range(min(tokenizer.vocab_size, vocab_size)) if token not in special)
        pairs = sorted((data, token) for token in ids if (data := tokenizer.token_bytes(token)))
        self._data, self._tokens = [data for data, _ in pairs], [token for _, token in pairs]
        self.of = dict(zip(self._tokens, self._data, strict=True))
        self._by_data = dict(pairs)

    def beginning_with(self, text: bytes) -> Iterator[int]:
        """The tokens whose bytes begin with `text`."""
        at = bisect_left(self._data, text)
        while at < len(self._data) and self._data[at].startswith(text):
            yield self._tokens[at]
            at += 1

    def goes_on(self, text: bytes) -> bool:
        """Return whether a token begins with `text` and is longer."""
        return any(self.of[token] != text for token in self.beginning_with(text))

    def parts_of(self, text: bytes) -> list[tuple[int, int]]:
        """The tokens that are a beginning of `text` and leave a rest, with their numbers of bytes."""
        sizes = range(1, len(text))
        return [(self._by_data[text[:size]], size) for size in sizes if text[:size] in self._by_data]


_PIECES: WeakKeyDictionary[Tokenizer, _Pieces] = WeakKeyDictionary()


def heal(
    tokenizer: Tokenizer, vocab_size: int, prompt: Tokens, controller: object | None
) -> tuple[Tokens, object | None, TokenHealing | None]:
    """The prompt without the tokens that are taken back, the controller, which spells their text if it is a constraint,
    and what the engine must know. Nothing changes if no token goes on where the prompt ends. Raises
    `UnsupportedFeature` with any other controller."""
    if not (controller is None or isinstance(controller, Constraint)):
        raise UnsupportedFeature(
            "token_healing: not supported with a controller, with tools or with reasoning. Leave it out.",
            "token_healing",
        )
    pieces = _PIECES.get(tokenizer)
    if pieces is None:
        pieces = _PIECES[tokenizer] = _Pieces(tokenizer, vocab_size)
    num_healed, text = _tail(pieces, prompt)
    if not num_healed:
        return prompt, controller, None
    kept, num_chars = prompt[: len(prompt) - num_healed], len(text.decode())
    if isinstance(controller, Constraint):
        return kept, Concat(text.decode(), controller), TokenHealing(num_chars)
    return kept, controller, _healing(pieces, text, num_chars, vocab_size)


def _tail(pieces: _Pieces, prompt: Tokens) -> tuple[int, bytes]:
    """The most tokens at the end of a prompt whose text begins a longer token, and that text. One token stays."""
    found, text = (0, b""), b""
    for number, token in enumerate(reversed(prompt[1:][-MAX_HEALED_TOKENS:]), 1):
        if token not in pieces.of or len(pieces.of[token] + text) > MAX_HEALED_BYTES:
            break
        text = pieces.of[token] + text
        if _is_whole(text) and pieces.goes_on(text):
            found = number, text
    return found


def _is_whole(text: bytes) -> bool:
    """Return whether bytes are whole characters."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _healing(pieces: _Pieces, text: bytes, num_chars: int, vocab_size: int) -> TokenHealing:
    """The masks at each place within `text`."""
    masks, steps = list[bytes](), list[tuple[tuple[int, int], ...]]()
    for start in range(len(text)):
        rest = text[start:]
        parts = pieces.parts_of(rest)
        tokens = [*(token for token, _ in parts), *pieces.beginning_with(rest)]
        masks.append(mask_of(tokens, vocab_size))
        steps.append(tuple(parts))
    return TokenHealing(num_chars, tuple(masks), tuple(steps))
