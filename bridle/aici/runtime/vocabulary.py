"""The vocabulary of a runtime: the bytes of every token, tokenization, and the tries that guests walk.

The tokenizer is the one of `bridle.tokenizer`; this module only converts its tokens for controllers. Special tokens
have no bytes. The vocabulary may have more tokens than the tokenizer (`--logits-size`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from bridle.aici.runtime.trie import TokenTrie, build_trie
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.file_cache import FileCache
from bridle.gguf.pointer import weights_of
from bridle.malloc import return_free_memory
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.tokenizer_files import TokenizerFiles, check_added, stored_chat_template

#: Maximum number of tokens that a model may have beyond its tokenizer's.
MAX_ADDED = 4096
#: Smaller vocabularies' tries are not stored, because building is as fast as reading. The edition is the stored form's.
_LEAST_TOKENS, _EDITION = 8_000, 1


@dataclass
class RuntimeVocabulary:
    """`tokens[i]` are the bytes of token i, empty for special tokens. `encode` tokenizes text without adding special
    tokens, but recognizes their names."""

    tokens: Sequence[bytes]
    eos: int
    encode: Callable[[str], Sequence[int]]
    special: frozenset[int] = frozenset()
    llguidance: Any = None
    tokenizer: Tokenizer | None = None  # with the chat template
    _tries: dict[int, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.tokens)

    def prepare(self) -> None:
        """Load the data for tokenizing, unless it is loaded already."""
        if self.tokenizer is not None:
            self.tokenizer.prepare()

    def trie(self, dialect: int) -> bytes:
        """Return the trie blob in the layout of a guest's dialect. Each layout is built once."""
        blob = self._tries.get(dialect)
        if blob is None:
            blob = self._tries[dialect] = kept_trie(self.tokens, self.eos, dialect)
        return blob

    @cached_property
    def _reader(self) -> TokenTrie:
        return TokenTrie(self.trie(2), 2)

    def tokenize(self, data: bytes, dialect: int) -> list[int]:
        """Return the tokens of UTF-8 bytes. For dialect-1 guests, invalid bytes are replaced. For dialect-2 guests, an
        incomplete character at the end is tokenized greedily."""
        if dialect == 1:
            return list(self.encode(data.decode(errors="replace")))
        try:
            return list(self.encode(data.decode()))
        except UnicodeDecodeError as error:
            head = data[: error.start]
            return list(self.encode(head.decode())) + self._reader.tokenize(data[error.start :])

    def padded(self, size: int | None) -> RuntimeVocabulary:
        """Return the vocabulary padded to `size` tokens. Added tokens have no bytes, so that no constraint can reach
        them. Raises `InvalidRequest`."""
        if size is None or size == self.size:
            return self
        extra = size - self.size
        if not 0 < extra <= MAX_ADDED:
            raise InvalidRequest(
                f"logits_size is {size}; must be the vocabulary size {self.size}, or up to {MAX_ADDED} more",
                "logits_size",
            )
        added = frozenset(range(self.size, size))
        return RuntimeVocabulary(
            [*self.tokens, *[b""] * extra], self.eos, self.encode, self.special | added, tokenizer=self.tokenizer
        )


def kept_trie(tokens: Sequence[bytes], eos: int, dialect: int) -> bytes:
    """Return the result of `build_trie`. A large trie is built once and cached on disk for all processes."""
    if len(tokens) < _LEAST_TOKENS:
        return build_trie(tokens, eos, dialect)
    digest = hashlib.blake2b(np.fromiter(map(len, tokens), np.int64, len(tokens)).tobytes())
    digest.update(b"".join(tokens))
    files = FileCache("tries")
    place = files.path(f"trie-{dialect}", f"{_EDITION} {eos} {dialect} {digest.hexdigest()}".encode())
    found = files.read(place, lambda size: np.empty(size, np.uint8))
    if found is not None:
        return found[1].tobytes()
    blob = build_trie(tokens, eos, dialect)
    files.write(place, b"trie", [np.frombuffer(blob, np.uint8)])
    return blob


def load_vocabulary(name: str, logits_size: int | None = None) -> RuntimeVocabulary:
    """Return the vocabulary of a `tokenizer.json`, a model folder, or a hub id with optional `@revision`."""
    path, _, revision = name.partition("@") if not name.startswith(("/", ".")) else (name, "", "")
    tokenizer = _load_tokenizer(path, revision or None)
    special = frozenset(tokenizer.special_token_ids)
    table = tokenizer.table
    tokens = list(map(tokenizer.token_bytes, range(tokenizer.vocab_size))) if table is None else table.all_bytes()
    for token in special:
        tokens[token] = b""
    eos = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return RuntimeVocabulary(tokens, eos, encode, special, tokenizer=tokenizer).padded(logits_size)


def _load_tokenizer(name: str, revision: str | None) -> Tokenizer:
    """Load a tokenizer. A `tokenizer.json` is loaded without transformers, whose import costs seconds and much memory
    in every process of the runtime. Tokenizers in other files are loaded with transformers."""
    from bridle.model.hub_lookup import resolve_model

    folder = Path(name).parent if name.endswith("tokenizer.json") else resolve_model(name, revision)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return Tokenizer.load(name, revision)
    return Tokenizer.of_folder(folder, partial(_read, folder), _outline(folder), kind="guests", name=str(folder))


def _outline(folder: Path) -> TokenizerFiles | None:
    """Return the stored metadata of a tokenizer that bridle wrote, without reading the tokenizer; None for other
    tokenizers."""
    if weights_of(folder) is None:
        return None
    return TokenizerFiles(lambda: _read(folder).backend, _roles(folder), stored_chat_template(folder))


def _read(folder: Path) -> TokenizerFiles:
    file = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_buffer(_without_prefix(file.read_bytes()))
    except Exception as error:  # the library raises bare exceptions
        raise UnsupportedModel(f"{file} cannot be read: {error}") from None
    check_added(folder, backend)
    return_free_memory()  # the data takes ten times the file's size, and every forked process would copy it
    return TokenizerFiles(backend, _roles(folder), stored_chat_template(folder))


def _without_prefix(text: bytes) -> bytes:
    """Remove the step of a tokenizer's JSON that puts a space before every text, because controllers tokenize parts of
    texts."""
    if b'"Prepend"' not in text:
        return text
    data = json.loads(text)
    normalizer = data.get("normalizer") or {}
    if normalizer.get("type") == "Sequence":
        steps = normalizer.get("normalizers", [])
        normalizer["normalizers"] = [step for step in steps if step.get("type") != "Prepend"]
    return json.dumps(data).encode()


def _roles(folder: Path) -> dict[str, str]:
    """Return the names of the special tokens by role, such as `eos_token`."""
    roles: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for role, value in content.items():
            text = value.get("content") if isinstance(value, dict) else value
            if role in ("bos_token", "eos_token", "pad_token", "unk_token") and isinstance(text, str):
                roles[role] = text
    return roles
