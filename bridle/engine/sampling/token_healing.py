"""Token healing: the last tokens of a prompt are removed, and the output first spells their text again.

A prompt may end inside a text that the tokenizer writes as one token (`Pa` of ` Paris`). A model has rarely seen a
prompt that ends inside a longer token. So the first tokens of the output may be any tokens that spell the removed text
and possibly more. A client sees only the text that follows its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridle.engine.control.decision import both_masks


@dataclass(frozen=True, slots=True)
class TokenHealing:
    """The removed end of the prompt has `num_chars` characters. `masks[i]` (a bit row) allows the tokens that may
    follow when the first i bytes of the removed text are spelled. `steps[i]` has the allowed tokens that do not
    complete the removed text, each with its number of bytes. There are no masks if a constraint already spells the
    text."""

    num_chars: int
    masks: tuple[bytes, ...] = ()
    steps: tuple[tuple[tuple[int, int], ...], ...] = ()

    def mask_after(self, tokens: Sequence[int], start: int) -> bytes | None:
        """Return the mask for the token after `tokens`; None if the removed text is already spelled. The output begins
        at index `start` of `tokens`."""
        spelled = 0
        for position in range(start, len(tokens)):
            size = dict(self.steps[spelled]).get(tokens[position]) if self.steps else None
            if size is None:
                return None
            spelled += size
        return self.masks[spelled] if self.masks else None

    def restrict(self, mask: bytes | None, tokens: Sequence[int], start: int) -> bytes | None:
        """Return `mask` without the tokens that do not spell the removed text."""
        own = self.mask_after(tokens, start)
        return mask if own is None else both_masks(mask, own)
