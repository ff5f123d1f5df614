"""Token healing: the last tokens of a prompt are removed, and an output first spells their text again.

A prompt may end within a text that the tokenizer writes as one token (`Pa` of ` Paris`). A model has hardly seen such a
split. So the first tokens of the output may be any that spell the removed text, and may extend it. A client sees only
the text that follows its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridle.engine.control.decision import both_masks


@dataclass(frozen=True, slots=True)
class TokenHealing:
    """The removed text has `num_chars` characters. `masks[i]` (a bit row) allows the tokens that may come when its
    first i bytes are spelled. `steps[i]` are those of them that leave a part of the text to spell, each with its number
    of bytes. There are no masks if a constraint spells the text."""

    num_chars: int
    masks: tuple[bytes, ...] = ()
    steps: tuple[tuple[tuple[int, int], ...], ...] = ()

    def mask_after(self, tokens: Sequence[int], start: int) -> bytes | None:
        """Return the mask for the token that comes after `tokens`, whose output begins at `start`; None if the text is
        already spelled."""
        spelled = 0
        for position in range(start, len(tokens)):
            size = dict(self.steps[spelled]).get(tokens[position]) if self.steps else None
            if size is None:
                return None
            spelled += size
        return self.masks[spelled] if self.masks else None

    def restrict(self, mask: bytes | None, tokens: Sequence[int], start: int) -> bytes | None:
        """Return `mask`, without the tokens that do not spell the removed text."""
        own = self.mask_after(tokens, start)
        return mask if own is None else both_masks(mask, own)
