"""Facts about a tokenizer's tokens that can be known without tokenizing: names, texts, and added tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from bridle.tokenizer.token_table import Spelling, TokenTable
from bridle.tokenizer.tokenizer_files import decoder_of

_NUM_PROBES = 48


class Vocabulary:
    """The tokens of a `tokenizers.Tokenizer`. `added` maps the ids of added tokens to their text, and to whether they
    are special."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.added: Mapping[int, tuple[str, bool]] = {
            token: (each.content, each.special) for token, each in added.items()
        }

    @classmethod
    def restore(
        cls,
        pieces: Sequence[str | None],
        gaps: Sequence[int],
        added: Mapping[int, tuple[str, bool]],
        table: TokenTable | None,
    ) -> Vocabulary:
        """Return the vocabulary with these parts, which needs no backend."""
        made = cls.__new__(cls)
        made.added = added
        vars(made).update(pieces=pieces, gaps=gaps, table=table)
        return made

    @cached_property
    def pieces(self) -> Sequence[str | None]:
        """Return the name of each token; None for an id without a token."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        pieces: list[str | None] = [None] * (1 + max(vocabulary.values(), default=-1))
        for piece, token in vocabulary.items():
            pieces[token] = piece
        for token, (text, _) in self.added.items():
            pieces[token] = text
        for token, missing in enumerate(pieces):
            if missing is None:  # a gap, or a piece that a later token has, too
                pieces[token] = self._backend.id_to_token(token)
        return pieces

    @cached_property
    def gaps(self) -> Sequence[int]:
        """Return the ids without a token."""
        return [token for token, piece in enumerate(self.pieces) if piece is None]

    @cached_property
    def table(self) -> TokenTable | None:
        """Return the table of token texts; None for vocabularies whose texts depend on neighbouring tokens."""
        try:
            spelling = Spelling(decoder_of(self._backend))
        except ValueError:
            return None
        table = TokenTable(self.pieces, spelling)
        return table if self._agrees(table) else None

    def _agrees(self, table: TokenTable) -> bool:
        """Return whether the table gives the same text as the backend for random tokens of complete characters."""
        whole = [t for t, piece in enumerate(self.pieces) if piece is not None and table.texts[t] is not None]
        rng = random.Random(0)
        for _ in range(_NUM_PROBES if whole else 0):
            tokens = rng.choices(whole, k=rng.randint(1, 6))
            if table.decode(tokens) != self._backend.decode(tokens, skip_special_tokens=False):
                return False
        return True
