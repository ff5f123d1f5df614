"""Caches large vocabularies on disk, so that a tokenizer that was loaded before is ready at once.

Reading a tokenizer of 262,000 tokens takes about a second, during which no other Python thread runs. A cache entry has
the data for all functions except tokenizing; the tokenizer itself is read when text is first tokenized. The entry
depends on the files of the folder (path, size, time of change) and on the versions of the libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np
import tokenizers

from bridle.file_cache import Bytes, FileCache
from bridle.tokenizer.token_table import Spec, Spelling, TokenTable
from bridle.tokenizer.tokenizer_files import TokenizerFiles
from bridle.tokenizer.unpacked_vocabulary import read_unpacked_vocabulary
from bridle.tokenizer.vocabulary import Vocabulary

#: The version of the format of entries.
_EDITION = 1
#: The minimum size of files that are cached; smaller files are read again as quickly.
LEAST_BYTES = 1 << 20


class _Entry(msgspec.Struct, frozen=True):
    """The header of a cache entry. `sizes` are the bytes of its data: lengths and characters of token names, lengths
    and characters of token texts, and the tokenizer as JSON. The JSON is empty if the folder's files have the
    tokenizer."""

    roles: dict[str, str]
    chat_template: Any
    added: dict[int, tuple[str, bool]]
    has_table: bool
    decoder: Spec | None
    raw: dict[int, bytes]
    sizes: tuple[int, int, int, int, int]


class PackedTexts(Sequence[str | None]):
    """Strings in one UTF-8 buffer, which become Python strings when one of them is read. `lengths` [N] int32 are in
    characters, -1 for None."""

    def __init__(self, lengths: Bytes, characters: Bytes) -> None:
        self._lengths = lengths.view(np.int32)
        self._characters = characters

    @cached_property
    def _items(self) -> list[str | None]:
        text = self._characters.tobytes().decode("utf-8")
        ends = accumulate(np.maximum(self._lengths, 0).tolist(), initial=0)
        items: list[str | None] = [text[begin:end] for begin, end in pairwise(ends)]
        for place in self.gaps:
            items[place] = None
        return items

    @property
    def gaps(self) -> list[int]:
        """Return the indices of None."""
        found: list[int] = np.flatnonzero(self._lengths < 0).tolist()
        return found

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> str | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[str | None]: ...

    def __getitem__(self, index: int | slice) -> str | list[str | None] | None:
        return self._items[index]

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._items)


def pack(items: Sequence[str | None]) -> tuple[Bytes, Bytes]:
    """Return lengths and characters for `PackedTexts`."""
    lengths = np.fromiter((-1 if item is None else len(item) for item in items), np.int32, len(items))
    characters = "".join(item for item in items if item is not None).encode("utf-8")
    return lengths.view(np.uint8), np.frombuffer(characters, np.uint8)


def load_vocabulary(
    folder: Path, kind: str, read: Callable[[], TokenizerFiles], outline: TokenizerFiles | None = None
) -> tuple[TokenizerFiles, Vocabulary]:
    """Return the tokenizer of a folder as `read` reads it, and its vocabulary. If the vocabulary comes from the cache,
    the tokenizer's backend is a function that reads it. The same is true if `outline` has the known facts of a folder
    that bridle wrote. `kind` distinguishes ways of reading. Raises the errors of `read`."""
    states = [(str(path.resolve()), path.stat()) for path in sorted(_files(folder))]
    if sum(state.st_size for name, state in states if name.endswith(".json")) < LEAST_BYTES:
        files = read()
        return files, Vocabulary(files.backend)
    key = [_EDITION, kind, [(name, state.st_size, state.st_mtime_ns) for name, state in states]]
    versions = [version(name) for name in ("tokenizers", "transformers")]
    cache = FileCache("vocabularies")
    place = cache.path(folder.name, msgspec.json.encode([key, versions]))
    found = cache.read(place, lambda size: np.empty(size, np.uint8))
    kept = None if found is None else _restore(*found, read)
    if kept is not None:
        return kept
    files, vocabulary = _read(folder, read, outline)
    if not files.is_derived or type(files.backend.model).__name__ != "Unigram":  # JSON rounds their scores
        cache.write(place, *_describe(files, vocabulary))
    return files, vocabulary


def _read(
    folder: Path, read: Callable[[], TokenizerFiles], outline: TokenizerFiles | None
) -> tuple[TokenizerFiles, Vocabulary]:
    vocabulary = None if outline is None else read_unpacked_vocabulary(folder, outline.special)
    if outline is None or vocabulary is None:
        files = read()
        return files, Vocabulary(files.backend)
    return outline, vocabulary


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files that may affect the tokenizer."""
    yield from (path for path in [*folder.iterdir(), *folder.glob("*/*.jinja")] if path.is_file())


def _describe(files: TokenizerFiles, vocabulary: Vocabulary) -> tuple[bytes, Sequence[Bytes]]:
    table = vocabulary.table
    spec = files.backend.to_str().encode() if files.is_derived else b""
    texts = pack([] if table is None else table.texts)
    parts = [*pack(vocabulary.pieces), *texts, np.frombuffer(spec, np.uint8)]
    entry = _Entry(
        roles=files.roles,
        chat_template=files.chat_template,
        added=dict(vocabulary.added),
        has_table=table is not None,
        decoder=None if table is None else table.decoder,
        raw={} if table is None else table.raw,
        sizes=tuple(part.nbytes for part in parts),  # type: ignore[arg-type]
    )
    return msgspec.json.encode(entry), parts


def _restore(text: bytes, data: Bytes, read: Callable[[], TokenizerFiles]) -> tuple[TokenizerFiles, Vocabulary] | None:
    """Return the tokenizer and the vocabulary of an entry; None if the entry is invalid."""
    try:
        entry = msgspec.json.decode(text, type=_Entry)
        parts = np.split(data, np.cumsum(entry.sizes)[:-1])
        pieces, table = PackedTexts(*parts[:2]), None
        if entry.has_table:
            table = TokenTable(pieces, Spelling(entry.decoder), list(PackedTexts(*parts[2:4])), entry.raw)
    except (msgspec.MsgspecError, ValueError):
        return None
    spec = parts[4]

    def open_backend() -> Any:
        return tokenizers.Tokenizer.from_buffer(spec.tobytes()) if spec.nbytes else read().backend

    files = TokenizerFiles(open_backend, entry.roles, entry.chat_template)
    return files, Vocabulary.restore(pieces, pieces.gaps, entry.added, table)
