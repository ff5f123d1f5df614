"""Reads the vocabulary of a GGUF file from the `tokenizer.json` that bridle wrote for it, without creating a tokenizer.

This takes a fifth of the time, and a server's first load needs only the vocabulary. The ids of added tokens and the
table of texts are correct by construction, so they are not compared with a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from bridle.tokenizer.token_table import Spec, Spelling, TokenTable
from bridle.tokenizer.vocabulary import Vocabulary


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool


class _Model(msgspec.Struct):
    type: Literal["BPE"]
    vocab: dict[str, int]


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added]
    decoder: Spec


def read_unpacked_vocabulary(folder: Path, roles: Iterable[str]) -> Vocabulary | None:
    """Return the vocabulary of a cached folder; None for tokenizers other than BPE. `roles` are the tokens that have a
    role, which makes them special tokens."""
    try:
        file = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError):
        return None
    ids = file.model.vocab
    added = {each.id: (each.content, each.special) for each in file.added_tokens}
    added |= {ids[text]: (text, True) for text in roles if text in ids and ids[text] not in added}
    pieces: list[str | None] = [None] * (1 + max(ids.values(), default=-1))
    for piece, token in ids.items():
        pieces[token] = piece
    gaps = [token for token, piece in enumerate(pieces) if piece is None]
    return Vocabulary.restore(pieces, gaps, added, TokenTable(pieces, Spelling(file.decoder)))
