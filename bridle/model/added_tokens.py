"""Checks that tokens which a model's files add to its vocabulary get the ids that the files state. Does not import
torch. The tokenizers library numbers added tokens itself, from the size of the vocabulary on, and ignores the ids in
the file. If the ids in the file have a gap, a token gets the id of another token, and all texts with that token are
wrong. Added tokens that are also in the vocabulary keep their vocabulary id.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bridle.errors import UnsupportedModel
from bridle.safe_repr import short_repr


class _Added(msgspec.Struct):
    added_tokens: Any = None
    added_tokens_decoder: Any = None


def refuse_renumbered(folder: Path, backend: Any) -> None:
    """Raise `UnsupportedModel` if an added token of the folder's files has another id in `backend`, the
    `tokenizers.Tokenizer` that was made of these files. `backend` may lack added tokens, because no other token gets
    their ids.
    """
    for file, token, stated in _stated(folder, backend):
        loaded = backend.token_to_id(token)
        if loaded is not None and loaded != stated:
            raise UnsupportedModel(
                f"{folder / file} gives the added token {short_repr(token)} the id {stated}, but it is loaded as "
                f"{loaded}. "
                "Ids of added tokens must follow the vocabulary's ids in order, without a gap. Add placeholders for "
                "the missing ids, or put the token with its id into the vocabulary"
            )


def _stated(folder: Path, backend: Any) -> Iterator[tuple[str, str, int]]:
    """Yield (file, token, id) for each added token of the files. Entries of `tokenizer_config.json` for tokens that the
    tokenizer already has are ignored, because transformers adds only unknown tokens."""
    known: set[str] = set()
    for entry in _items(_read(folder / "tokenizer.json").added_tokens):
        token, stated = entry.get("content"), entry.get("id")
        if isinstance(token, str) and isinstance(stated, int):
            known.add(token)
            yield "tokenizer.json", token, stated
    configured = _read(folder / "tokenizer_config.json").added_tokens_decoder
    if not isinstance(configured, dict):
        return
    known.update(backend.get_vocab(with_added_tokens=False))
    for key, entry in configured.items():
        token = entry.get("content") if isinstance(entry, dict) else None
        if isinstance(token, str) and token not in known and key.isdecimal():
            yield "tokenizer_config.json", token, int(key)


def _items(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _read(path: Path) -> _Added:
    """Return the added tokens in a file; an empty list if the file is missing. The loader has already refused
    unreadable files. The vocabulary, the largest part of the file, is not parsed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Added)
    except (OSError, msgspec.MsgspecError):
        return _Added()
