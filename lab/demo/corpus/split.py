"""Which combinations the model may be trained on.

Every exercise has a key (a fact with one of its phrasings, a pair of numbers, the arguments of a tool call
with the wording of the request). A hash of the key, not chance, decides on which side it lies, so a
combination that is held out is absent from every training text, whatever the seed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "heldout"]

HELD_OUT_PERCENT = 12


def split_of(key: tuple[str, ...]) -> Split:
    """The side on which a key lies; the same in every run and on every machine."""
    digest = hashlib.blake2b("\x1f".join(key).encode(), digest_size=4).digest()
    return "heldout" if int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT else "train"
