"""When queued prompts get their part of a step, while others decode.

A prompt makes every stream beside it wait, so it may have to wait itself: until enough others wait with it to make the
pause worth while, or until the streams have run undisturbed for long enough. Counts only; knows nothing of sequences.
"""

from __future__ import annotations


class PromptGate:
    """Open if nothing decodes, if `ratio` times as many prompts are queued as sequences decode, or after `max_steps`
    steps in a row in which sequences decoded and no prompt was computed."""

    def __init__(self, ratio: float = 0.0, max_steps: int = 0) -> None:
        self.ratio = ratio
        self.max_steps = max_steps
        self._num_steps = 0  # of decoding alone, in a row

    @property
    def is_always_open(self) -> bool:
        """Whether it makes nobody wait, so that nothing need be counted."""
        return self.ratio == 0 or self.max_steps == 0

    def is_open(self, num_queued: int, num_decoding: int) -> bool:
        """Whether queued prompts may be admitted now."""
        if num_decoding == 0 or self._num_steps >= self.max_steps:
            return True
        return num_queued >= self.ratio * num_decoding

    def note(self, *, had_prompts: bool, had_decodes: bool) -> None:
        """A step was planned."""
        if had_prompts:
            self._num_steps = 0
        elif had_decodes:
            self._num_steps += 1
