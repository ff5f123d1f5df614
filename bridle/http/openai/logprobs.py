"""Formats log-probabilities for the OpenAI API: as parallel lists for completions, as one object per token for
chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bridle.outputs import Logprob
from bridle.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no minus infinity


class CompletionLogprobs:
    """Formats log-probabilities for one choice of `/v1/completions`, whose text grows.

    `text_offset` counts characters of the choice's text. A token with only a part of a character has the offset of that
    character. A special token has length 0 unless the text contains it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._num_chars = 0

    def shape(
        self, text: str, tokens: Sequence[int], entries: Sequence[Logprob | None], num_top: int
    ) -> dict[str, Any]:
        """Return the parallel lists for the next tokens, whose text is `text`, with `num_top` alternatives for each
        token."""
        self._text += text
        return {
            "tokens": [_name(self._tokenizer, token) for token in tokens],
            "token_logprobs": [None if entry is None else _number(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry, num_top) for entry in entries] if num_top else None,
            "text_offset": [self._offset(token) for token in tokens],
        }

    def rewind(self, num_chars: int) -> None:
        """Roll back the last `num_chars` characters of the choice's text."""
        self._text = self._text[: len(self._text) - num_chars]
        self._num_chars = len(self._text)

    def _top(self, entry: Logprob | None, num_top: int) -> dict[str, float] | None:
        if entry is None:
            return None
        best: dict[str, float] = {}
        for token, logprob in (*entry.top[:num_top], (entry.token, entry.logprob)):
            best.setdefault(_name(self._tokenizer, token), _number(logprob))
        return best

    def _offset(self, token: int) -> int:
        data = self._tokenizer.token_bytes(token)
        if token in self._tokenizer.special_token_ids and not self._is_shown(data):
            data = b""
        is_inside = bool(data) and data[0] & 0xC0 == 0x80 and self._num_chars > 0
        offset = self._num_chars - 1 if is_inside else self._num_chars
        self._num_chars += sum(byte & 0xC0 != 0x80 for byte in data)
        return offset

    def _is_shown(self, data: bytes) -> bool:
        return self._text.startswith(data.decode("utf-8", "replace"), self._num_chars)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[int], entries: Iterable[Logprob | None], num_top: int
) -> dict[str, Any]:
    """Return the log-probabilities of one choice of `/v1/chat/completions`."""
    rows = []
    for token, entry in zip(tokens, entries, strict=True):
        logprob = _LOWEST if entry is None else entry.logprob
        top = () if entry is None else entry.top[:num_top]
        row = _row(tokenizer, token, logprob)
        row["top_logprobs"] = [_row(tokenizer, other, value) for other, value in top]
        rows.append(row)
    return {"content": rows, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[Logprob | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return the log-probabilities of a prompt in vLLM's format: an object for each token. The keys of the object are
    the token's id and the ids of the `num_top` most probable tokens. The first entry is null, because no token precedes
    the first token."""
    return [None if entry is None else _by_id(tokenizer, entry, num_top) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: Logprob, num_top: int) -> dict[str, dict[str, Any]]:
    ranked = [(entry.token, entry.logprob, entry.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:num_top], 1)]
    found: dict[str, dict[str, Any]] = {}
    for token, logprob, rank in ranked:
        shape = {"logprob": _number(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        found.setdefault(str(token), shape)
    return found


def _row(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": _name(tokenizer, token), "logprob": _number(logprob), "bytes": list(data)}


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text. A token with only a part of a character is written as bytes, so that different tokens
    have different names."""
    text = tokenizer.token_text(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)
