"""Decides which tokens of a prompt are removed for token healing."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from bridle.engine.control.decision import mask_of
from bridle.engine.sampling.token_healing import TokenHealing
from bridle.errors import UnsupportedFeature
from bridle.structured_output.spec import Concat, Constraint
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.token_prefixes import TokenPrefixes

#: Maximum number of tokens that are removed, and maximum number of bytes of their text.
MAX_HEALED_TOKENS = 4
MAX_HEALED_BYTES = 32

Tokens = tuple[int, ...]


_PREFIXES: WeakKeyDictionary[Tokenizer, TokenPrefixes] = WeakKeyDictionary()


def _prefixes(tokenizer: Tokenizer, vocab_size: int) -> TokenPrefixes:
    """Return the ordinary tokens of a model for lookup by prefix. The tokens are sorted once per model."""
    found = _PREFIXES.get(tokenizer)
    if found is None:
        special = frozenset(tokenizer.special_token_ids) | frozenset(tokenizer.eos_token_ids)
        ids = (token for token in range(min(tokenizer.vocab_size, vocab_size)) if token not in special)
        found = _PREFIXES[tokenizer] = TokenPrefixes((token, tokenizer.token_bytes(token)) for token in ids)
    return found


def heal(
    tokenizer: Tokenizer, vocab_size: int, prompt: Tokens, controller: object | None
) -> tuple[Tokens, object | None, TokenHealing | None]:
    """Return the prompt without its removed last tokens, the controller, and the healing data for the engine. If the
    controller is a constraint, the constraint spells the text of the removed tokens. If no token extends the end of the
    prompt, nothing is changed. Raises `UnsupportedFeature` for any other controller."""
    if not (controller is None or isinstance(controller, Constraint)):
        raise UnsupportedFeature(
            "token_healing: not supported with a controller, with tools or with reasoning. Leave it out.",
            "token_healing",
        )
    pieces = _prefixes(tokenizer, vocab_size)
    num_healed, text = _tail(pieces, prompt)
    if not num_healed:
        return prompt, controller, None
    kept, num_chars = prompt[: len(prompt) - num_healed], len(text.decode())
    if isinstance(controller, Constraint):
        return kept, Concat(text.decode(), controller), TokenHealing(num_chars)
    return kept, controller, _healing(pieces, text, num_chars, vocab_size)


def _tail(pieces: TokenPrefixes, prompt: Tokens) -> tuple[int, bytes]:
    """Return the largest number of last tokens of a prompt whose text is the beginning of a longer token, and that
    text. At least one token of the prompt stays."""
    found, text = (0, b""), b""
    for number, token in enumerate(reversed(prompt[1:][-MAX_HEALED_TOKENS:]), 1):
        if token not in pieces.bytes_of or len(pieces.bytes_of[token] + text) > MAX_HEALED_BYTES:
            break
        text = pieces.bytes_of[token] + text
        if _is_whole(text) and pieces.goes_on(text):
            found = number, text
    return found


def _is_whole(text: bytes) -> bool:
    """Return whether the bytes are whole characters."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _healing(pieces: TokenPrefixes, text: bytes, num_chars: int, vocab_size: int) -> TokenHealing:
    """Return the healing data for the engine, with the masks for each position within `text`."""
    masks, steps = list[bytes](), list[tuple[tuple[int, int], ...]]()
    for start in range(len(text)):
        rest = text[start:]
        masks.append(mask_of(pieces.agreeing_with(rest), vocab_size))
        steps.append(tuple(pieces.parts_of(rest)))
    return TokenHealing(num_chars, tuple(masks), tuple(steps))
