"""A model's tokenizer: text to tokens and back, special tokens, the bytes of each token, and the chat template.

The tokenizer uses the fast tokenizers that transformers loads. Code from a model's repository is never run. Truncation
and padding in a tokenizer file are turned off: a prompt is encoded whole or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

from bridle.errors import InvalidRequest
from bridle.tokenizer.chat_settings import ChatSettings
from bridle.tokenizer.chat_template import ChatTemplate, Message, prepare
from bridle.tokenizer.token_table import TokenTable
from bridle.tokenizer.tokenizer_files import TokenizerFiles, end_tokens, outline_unpacked, read_tokenizer
from bridle.tokenizer.vocabulary import Vocabulary
from bridle.tokenizer.vocabulary_cache import load_vocabulary

_LONG_CHARS = 1_024
_BEFORE = ("\n", "a", ".", "1", " ")  # after these texts, tokenizers usually begin a new token
_HALF_CHARACTER = "the text is not valid Unicode: it has half of a surrogate pair"


class Tokenizer:
    """A model's tokenizer, created by `Tokenizer.load`. Safe to use from several threads."""

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        name: str = "tokenizer",
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """Create a tokenizer. `backend` is a `tokenizers.Tokenizer`, or a function that reads one when text is first
        tokenized; such a function requires `vocabulary`. `special_tokens` maps roles such as `bos_token` to tokens."""
        self._open, self._opened, self._opening = backend, None, Lock()
        self._vocabulary = vocabulary or Vocabulary(self._backend)
        self._name = name
        self._roles = dict(special_tokens or {})
        added = self._vocabulary.added
        self._added_ids = {text: token for token, (text, _) in added.items()}
        named = (self._id_of(token) for token in self._roles.values())
        special = {token for token, (_, is_special) in added.items() if is_special}
        special.update(token for token in named if token is not None)
        #: Tokens that do not appear in the text of outputs.
        self.special_token_ids: frozenset[int] = frozenset(special)
        self.bos_token_id: int | None = self._id_of(self._roles.get("bos_token"))
        own_end = self._id_of(self._roles.get("eos_token"))
        ends = ([] if own_end is None else [own_end]) + list(eos_token_ids)
        #: Tokens that end an output.
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        #: The template that renders conversations as prompts.
        self.chat_template = ChatTemplate(chat_template, self._roles)
        #: The operator's settings for conversations.
        self.chat_settings = ChatSettings()

    @classmethod
    def load(cls, path_or_id: str | Path, revision: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model: a folder, a hub id, or `demo`. Raises `UnsupportedModel` if the model has no
        usable tokenizer, and `InvalidRequest` if there is no such model."""
        from bridle.model.hub_lookup import resolve_model

        folder = resolve_model(str(path_or_id), revision)
        read, outline = partial(read_tokenizer, folder), outline_unpacked(folder)
        return cls.of_folder(folder, read, outline, kind="served", name=str(path_or_id))

    @classmethod
    def of_folder(
        cls, folder: Path, read: Callable[[], TokenizerFiles], outline: TokenizerFiles | None, *, kind: str, name: str
    ) -> Tokenizer:
        """Load the tokenizer that `read` reads from a folder; see `load_vocabulary`. Raises the errors of `read`."""
        files, vocabulary = load_vocabulary(folder, kind, read, outline)
        return cls(
            files.backend,
            special_tokens=files.roles,
            chat_template=files.chat_template,
            eos_token_ids=end_tokens(folder),
            name=name,
            vocabulary=vocabulary,
        )

    def prepare(self) -> None:
        """Read the data for tokenizing, if it was not read yet. Safe from any thread."""
        with self._opening:
            if self._opened is None:
                opened = self._open() if callable(self._open) else self._open
                opened.no_truncation()
                opened.no_padding()
                self._opened, self._open = opened, None

    @property
    def _backend(self) -> Any:
        if self._opened is None:
            self.prepare()
        return self._opened

    # -- the vocabulary --------------------------------------------------------------------------------------

    @cached_property
    def vocab_size(self) -> int:
        """Return the largest token id plus one, added tokens included."""
        return len(self._pieces)

    @cached_property
    def _pieces(self) -> Sequence[str | None]:
        return self._vocabulary.pieces

    def without_token(self, num_ids: int) -> list[int]:
        """Return the ids below `num_ids` that have no token: gaps of the vocabulary, and the ids after its end."""
        gaps = [token for token in self._vocabulary.gaps if token < num_ids]
        return gaps + list(range(self.vocab_size, num_ids))

    def beyond(self, num_ids: int) -> tuple[list[str], list[str]]:
        """Return the tokens whose ids are not below `num_ids`: ordinary tokens, and added tokens."""
        added = self._vocabulary.added
        ordinary: list[str] = []
        further: list[str] = []
        for token, piece in enumerate(self._pieces[num_ids:] if num_ids < self.vocab_size else (), num_ids):
            if piece is not None:
                (further if token in added else ordinary).append(piece)
        return ordinary, further

    def first_difference(self, other: Tokenizer) -> tuple[int, str | None, str | None] | None:
        """Return the first token id with different pieces in two vocabularies, with both pieces. Return None if all
        common ids are equal, even if one vocabulary is longer."""
        pairs = enumerate(zip(self._pieces, other._pieces, strict=False))
        return next(((token, own, its) for token, (own, its) in pairs if own != its), None)

    @cached_property
    def table(self) -> TokenTable | None:
        """Return the table of token texts; None for vocabularies whose texts depend on neighbouring tokens."""
        return self._vocabulary.table

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """Return the texts that are tokens wherever they occur, special or not."""
        return tuple(self._added_ids)

    def id_of(self, token: str) -> int | None:
        """Return the token with this name in the vocabulary; None if there is none."""
        return self._id_of(token)

    def _id_of(self, token: str | None) -> int | None:
        if token is None:
            return None
        known = self._added_ids.get(token)
        return self._backend.token_to_id(token) if known is None else known

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; a character's bytes may be spread over several tokens. For a
        special token, return its name. Empty for an id without a token."""
        if self.table is not None:
            return self.table.bytes_of(token)
        if not 0 <= token < self.vocab_size or self._pieces[token] is None:
            return b""
        before, between = self._around
        text = str(self._backend.decode([self._anchor, token, self._anchor], skip_special_tokens=False))
        return text[len(before) : len(text) - len(between)].encode("utf-8")

    @cached_property
    def _around(self) -> tuple[str, str]:
        """Return the text of the anchor token at the beginning of a text, and the text that it adds inside a text."""
        once = str(self._backend.decode([self._anchor], skip_special_tokens=False))
        twice = str(self._backend.decode([self._anchor, self._anchor], skip_special_tokens=False))
        return once, twice[len(once) :]

    @cached_property
    def _anchor(self) -> int:
        """Return a token to put before and after another token: letters or digits, if the vocabulary has such a
        token."""
        plain = (t for t, piece in enumerate(self._pieces) if piece is not None and piece.isalnum())
        return next(plain, 0)

    def token_text(self, token: int) -> str:
        """Return the text of a token for display. Bytes that are not complete characters become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    # -- text and tokens -------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of `text`. `add_special_tokens` adds the tokens that the model expects around a document.
        Raises `InvalidRequest` if `text` is not valid Unicode."""
        try:
            if len(text) > _LONG_CHARS:  # only batches release the interpreter for other threads
                return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # the library's error for lone surrogates
            raise InvalidRequest(_HALF_CHARACTER) from None

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text inside of an output: no space is added at its beginning. If no spelling is exact,
        characters that cannot be spelled are left out."""
        wanted = text.encode("utf-8", "replace")
        for before in ("", *_BEFORE):
            tokens = self.encode_with_offsets(before + text, add_special_tokens=False)
            inside = [token for token, start, _ in tokens if start >= len(before)]
            if b"".join(map(self.token_bytes, inside)) == wanted:
                return inside
        return [token for char in text for token in self.encode_inside(char)] if len(text) > 1 else []

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """Return the tokens as `encode` does, each with its range of characters. The range is empty for tokens that
        were added."""
        try:
            (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:  # the library's error for lone surrogates
            raise InvalidRequest(_HALF_CHARACTER) from None
        return [(token, start, stop) for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True)]

    def encode_cut(self, text: str, limit: int | None = None) -> list[int]:
        """Return the tokens as `encode` does. A text with more than `limit` tokens is truncated at its end, and keeps
        the tokens that the model expects around a document."""
        tokens = self.encode(text)
        if limit is None or len(tokens) <= limit:
            return tokens
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=False)
        encoded.truncate(max(limit - self._backend.num_special_tokens_to_add(False), 0))
        return list(self._backend.post_process(encoded, None, True).ids)[:limit]

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> list[tuple[int, int]]:
        """Return the tokens of two texts, with the tokens that the model expects around and between them. For models
        with token types, each token has its type: 0 for the first text, 1 for the second. With `limit`, the longer text
        is truncated first."""
        try:
            one, other = self._backend.encode_batch([first, second], add_special_tokens=False)
        except TypeError:  # the library's error for lone surrogates
            raise InvalidRequest(_HALF_CHARACTER) from None
        if limit is not None:
            room = max(limit - self._backend.num_special_tokens_to_add(True), 0)
            for part, length in zip((one, other), _shared_room(len(one), len(other), room), strict=True):
                part.truncate(length)
        both = self._backend.post_process(one, other, True)
        return list(zip(both.ids, both.type_ids, strict=True))[:limit]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`. Ids without a token leave no text."""
        visible = [t for t in tokens if not (skip_special_tokens and t in self.special_token_ids)]
        if self.table is not None:
            return self.table.decode(visible)
        known = [t for t in visible if 0 <= t < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=False))

    # -- chat ------------------------------------------------------------------------------------------------

    @property
    def template_text(self) -> str:
        """Return the source of the chat template; if there are several templates, all sources joined."""
        return self.chat_template.text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt for a conversation. `template` replaces the model's own template, and is rendered in a
        separate process with limits. `kwargs` are additional variables of the template. Raises `InvalidRequest` if
        there is no template, or if the template refuses the messages, fails, or takes too long."""
        prepared = prepare(messages, template=self.chat_template.text if template is None else template)
        return self.chat_template.render(prepared, tools, template, kwargs, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Return the tokens of `render_chat`, which has the same arguments."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def __repr__(self) -> str:
        return f"Tokenizer({self._name!r}, vocab_size={self.vocab_size})"


def _shared_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths that two texts keep of the limit `room`; the longer text is truncated first."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)
