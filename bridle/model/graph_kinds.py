"""Kinds of steps that have separate CUDA graphs, and the step sizes (in tokens) that are captured for each kind. Each
kind launches only the kernels that it needs. Steps without long chunks launch no prefill kernels, and steps without
adapters no adapter kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from bridle.lora.fused import SHORT_TILE
from bridle.model.kernels import paged
from bridle.model.kernels.prompts import MIN_TOKENS
from bridle.model.kernels.rows import StepShape

#: Maximum tokens of a step that has a graph. Longer steps keep a GPU busy while its host prepares the next launch.
MOST_TOKENS = MIN_TOKENS - 1
#: Maximum tokens of a step that has a graph, adapters, and no long chunk. Each of its tokens may have another adapter.
MOST_ADAPTED_TOKENS = 64
_SIZES = (1, 2, 4, *range(8, 257, 8), *range(320, MOST_TOKENS + 1, 64))


class GraphKind(NamedTuple):
    """A kind of steps. A kind's fields say whether its steps may have long chunks, and whether their sequences may have
    adapters."""

    has_long: bool = False
    has_adapters: bool = False

    def __str__(self) -> str:
        what = [name for name, has in zip(("long chunks", "adapters"), self, strict=True) if has]
        return " with " * bool(what) + " and ".join(what)

    def sizes(self, num_tokens: int) -> list[int]:
        """Return the step sizes to capture, each of at most `num_tokens` tokens."""
        if self.has_long:  # a small step has no long chunk
            sizes = [size for size in _SIZES if size > paged.MAX_SHORT and size % paged.MAX_SHORT == 0]
        else:
            sizes = [size for size in _SIZES if size <= MOST_ADAPTED_TOKENS or not self.has_adapters]
        return [size for size in sizes if size <= num_tokens]

    def shape(self, size: int, max_seqs: int) -> StepShape:
        """Return the capacity of a step of `size` tokens. In steps with long chunks, there is space for one logits row
        per sequence. Space for more logits rows would make the output head's product larger in every step."""
        if not self.has_long:
            return StepShape(size, size)
        return StepShape(size, min(size, max_seqs), size // (paged.MAX_SHORT + 1))


#: In the order in which they are captured. Without the first kind, no kind is captured.
KINDS = tuple(GraphKind(has_long, has_adapters) for has_adapters in (False, True) for has_long in (False, True))


def most_tiles(size: int) -> int:
    """Return the maximum number of adapter tiles in a captured step of `size` tokens: enough for one long chunk and
    some single tokens."""
    return min(size, size // SHORT_TILE + MOST_ADAPTED_TOKENS)
