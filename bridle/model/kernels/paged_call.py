"""Arguments of one layer's attention for the kernels of `bridle.model.kernels.paged`, and their compile-time sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from bridle.lora.fused import Machine
from bridle.model.forward_context import AttentionOptions
from bridle.model.kv_cache import LayerCache

#: Rows of a program: 16 is the minimum that tensor cores multiply.
SHORT_ROWS, LONG_ROWS = 16, 64
#: The value that means no window.
NO_WINDOW = (1 << 31) - 1


class Blocks(NamedTuple):
    """Sizes of a program's work: query rows, keys per iteration, warps, and iterations whose data is loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


def blocks_for(is_short: bool, dim: int, item_size: int, capability: tuple[int, int]) -> Blocks:
    """Return block sizes for heads of width `dim` and values of `item_size` bytes. With these sizes, a program fits
    into the registers and shared memory of a GPU with this compute capability."""
    wide = dim > 128
    if item_size == 4:  # float32 is multiplied without tensor cores
        return Blocks(16, 32 if not wide else 16, 4 if dim <= 64 else 8, 1)
    if is_short:
        return Blocks(SHORT_ROWS, 64 if not wide else 32, 4, 3)  # enough for two buffers of keys and values
    # Code for these GPUs needs more registers: with 64 keys of more than 64 values, some registers would spill.
    is_tight = (8, 6) <= capability < (9, 0) or capability >= (12, 0)
    return Blocks(LONG_ROWS, 64 if dim <= (64 if is_tight else 128) else 32, 4 if not wide else 8, 2)


class AttentionCall:
    """Arguments of one layer's attention for the kernels."""

    def __init__(
        self, query: Tensor, cache: LayerCache, options: AttentionOptions, out: Tensor, machine: Machine
    ) -> None:
        self.query, self.cache, self.options, self.out = query, cache, options, out
        self.num_heads, self.dim = query.shape[1:]
        self.kv_heads = cache.keys.shape[1]
        self.group = self.num_heads // self.kv_heads
        self.value_dim = cache.values.shape[-1]
        self.window = NO_WINDOW if options.window is None else options.window
        self.has_sinks = options.sinks is not None
        self.sinks = out if options.sinks is None else options.sinks  # without sinks, any valid pointer
        self.has_softcap = options.softcap is not None
        self.numbers = (options.scaling, self.window, options.softcap or 1.0)
        self.strides = (query.stride(0), query.stride(1), cache.keys.stride(0), cache.values.stride(0))
        self._machine = machine

    def inputs(self, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        return (self.query, self.cache.keys, self.cache.values, *more)

    def gathered(self, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Return contiguous keys and values [context, Hkv, D] of the sequence whose pages are in `table`."""
        size = self.cache.block_size
        pages = table[: -(-context // size)]
        keys, values = (
            part.view(-1, size, *part.shape[1:]).index_select(0, pages).flatten(0, 1)[:context]
            for part in (self.cache.keys, self.cache.values)
        )
        return keys, values

    def sizes(self, *, is_short: bool) -> dict[str, Any]:
        """Return the kernels' compile-time arguments, for short or long chunks."""
        block_dim, block_value = block_of(self.dim), block_of(self.value_dim)
        blocks = blocks_for(is_short, max(block_dim, block_value), self.out.element_size(), self._machine.capability)
        return {
            "group": self.group,
            "dim": self.dim,
            "value_dim": self.value_dim,
            "page": self.cache.block_size,
            "block_rows": blocks.rows,
            "block_dim": block_dim,
            "block_value": block_value,
            "block_keys": blocks.keys,
            "has_softcap": self.has_softcap,
            "is_wide": self._machine.is_wide,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }


def block_of(dim: int) -> int:
    """Return the smallest power of two that is at least `dim`, and at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
