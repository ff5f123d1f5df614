"""Applies adapters in plain torch. The module is used on CPUs, and as the reference for `fused`.

A long segment is multiplied separately. Many short segments are multiplied as one product: their adapters' weights are
stacked, and their rows are padded to one length. The stack is kept between steps, and only the weights of adapters that
the last step did not have are copied into it. Segments are stacked up to the length that minimizes the cost. If all
segments were stacked, decode rows would be padded to the length of a prompt in the same step. Stacked products and
separate products give the same sums up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bridle.lora.layout import AdapterLayout
from bridle.lora.ops import Product, Segment
from bridle.lora.weights import PlacedAdapter, SiteWeights

#: Segments longer than this are multiplied alone.
MAX_SHORT = 16
#: On a CPU, a segment that is multiplied alone takes as long as this many more rows in a stack. Measured with 24
#: layers: 1 ms, while a stack of 32 adapters takes 14 ms with one row each and 25 ms with 16.
SINGLE_ROWS = 40
#: Fewer short segments of one layout than this are multiplied alone, too.
MIN_STACKED = 3
#: Maximum bytes of a stack. Beyond this, segments are multiplied one by one.
MAX_STACK_BYTES = 1 << 29
#: Maximum number of stacks, one per layout; the least recently used one is dropped.
MAX_STACKS = 2


class SingleProduct:
    """Product of segments whose adapters have the same layout, computed one after the other."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.sites: Iterable[int] = segments[0].adapter.layout.blocks
        self._segments = [(segment.start, segment.stop, segment.adapter.sites) for segment in segments]

    def add(self, site: int, out: Tensor, rows: Tensor) -> None:
        """Add the adapters' results for `rows` [T, in] to `out` [T, columns], in place."""
        for start, stop, sites in self._segments:
            weights = sites[site]
            hidden = rows[start:stop] @ weights.first  # [n, rank]
            part_of = out[start:stop]
            for part, second in zip(weights.block.parts, weights.seconds, strict=True):
                columns, ranks = part.columns, part.ranks
                part_of[:, columns.begin : columns.end].addmm_(hidden[:, ranks.begin : ranks.end], second)


def _uploaded(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy indices to the device; the host does not wait for the copy."""
    if device.type == "cpu":
        return torch.tensor(values)
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)


class StackedProduct:
    """Product of short segments whose adapters have the same layout, computed all at once. The weights of segment i are
    in row `slots[i]` of the weight stack."""

    def __init__(self, segments: Sequence[Segment], slots: Sequence[int], sites: Mapping[int, SiteWeights]) -> None:
        self.sites: Iterable[int] = segments[0].adapter.layout.blocks
        self._weights = sites
        self._num, self._length = len(segments), max(segment.length for segment in segments)
        self._begin, self._end = segments[0].start, segments[-1].stop
        num_rows = sum(segment.length for segment in segments)
        is_padded = num_rows < len(segments) * self._length
        device = segments[0].adapter.flat.device
        taken, given, targets = _indices(segments, slots, self._length)
        is_plain = taken == targets and num_rows == self._end - self._begin
        # The source of each padded row; the padded rows that count (None: all); and their rows of the step.
        self._taken = None if is_plain else _uploaded(taken, device)
        self._given = _uploaded(given, device) if is_padded else None
        self._targets = None if is_plain else _uploaded(targets if is_padded else taken, device)

    def add(self, site: int, out: Tensor, rows: Tensor) -> None:
        """Add the adapters' results for `rows` [T, in] to `out` [T, columns], in place."""
        weights = self._weights[site]
        num, length = self._num, self._length
        if self._taken is None:
            padded = rows[self._begin : self._end]
        else:
            padded = rows.index_select(0, self._taken)
        hidden = torch.bmm(padded.view(num, length, -1), weights.first[:num])  # [S, n, rank]
        for part, second in zip(weights.block.parts, weights.seconds, strict=True):
            columns, ranks = part.columns, part.ranks
            added = torch.bmm(hidden[:, :, ranks.begin : ranks.end], second[:num]).view(num * length, -1)
            if self._given is not None:
                added = added.index_select(0, self._given)
            if self._targets is None:
                out[self._begin : self._end, columns.begin : columns.end] += added
            else:
                out[:, columns.begin : columns.end].index_add_(0, self._targets, added)


def _indices(segments: Sequence[Segment], slots: Sequence[int], length: int) -> tuple[list[int], list[int], list[int]]:
    """Return three index lists for a product with padded rows, which are in the order of slots. The lists are the input
    row of each padded row, the padded row of each result, and the output row of each result."""
    taken = [segments[0].start] * (len(segments) * length)
    given: list[int] = []
    targets: list[int] = []
    for segment, slot in zip(segments, slots, strict=True):
        first = slot * length
        taken[first : first + segment.length] = range(segment.start, segment.stop)
        given.extend(range(first, first + segment.length))
        targets.extend(range(segment.start, segment.stop))
    return taken, given, targets


class WeightStack:
    """The stacked weights of adapters of one layout, kept between steps. The first rows of the stack hold the adapters
    of the last step."""

    def __init__(self, layout: AdapterLayout, like: Tensor) -> None:
        self._layout = layout
        self._buffer = like.new_empty(0, layout.num_values)  # [capacity, values]
        self._owners: list[int] = []  # serial of the adapter in each row
        self.sites: dict[int, SiteWeights] = {}

    def load_rows(self, adapters: Sequence[PlacedAdapter]) -> list[int]:
        """Copy adapters into the first rows of the stack; return the row of each adapter."""
        num = len(adapters)
        if num > len(self._owners):
            self._grow(num)
        wanted = {adapter.serial for adapter in adapters}
        rows: dict[int, int] = {}
        free = []
        for row, owner in enumerate(self._owners[:num]):
            if owner in wanted and owner not in rows:  # an old copy may be in a later row
                rows[owner] = row
            else:
                free.append(row)
        for adapter in adapters:
            if adapter.serial not in rows:
                row = rows[adapter.serial] = free.pop(0)
                self._buffer[row].copy_(adapter.flat)
                self._owners[row] = adapter.serial
        return [rows[adapter.serial] for adapter in adapters]

    def _grow(self, num: int) -> None:
        old = self._buffer
        self._buffer = old.new_empty(num, self._layout.num_values)
        self._buffer[: old.shape[0]].copy_(old)
        self._owners += [0] * (num - len(self._owners))
        self.sites = {site: SiteWeights(block, self._buffer) for site, block in self._layout.blocks.items()}


class TorchKernel:
    """Implements `AdapterKernel`: multiplies segments grouped by layout, and stacks short segments."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[AdapterLayout, WeightStack]] = {}  # by the layout's identity

    def prepare(self, adapter: PlacedAdapter) -> None:
        """Do nothing, because plain torch needs no preparation for an adapter."""

    def products(self, segments: Sequence[Segment]) -> list[Product]:
        groups: dict[int, list[Segment]] = {}
        for segment in segments:
            groups.setdefault(id(segment.adapter.layout), []).append(segment)
        return [product for group in groups.values() for product in self._products_of(group)]

    def clear(self) -> None:
        self._stacks.clear()

    def _products_of(self, segments: Sequence[Segment]) -> list[Product]:
        """Return the products that compute `segments`, whose adapters have the same layout."""
        flat = segments[0].adapter.flat
        longest = MAX_SHORT if flat.is_cuda else _longest_stacked([segment.length for segment in segments])
        short = [segment for segment in segments if segment.length <= longest]
        adapters = list({segment.adapter.serial: segment.adapter for segment in short}.values())
        is_small = len(short) * flat.nbytes <= MAX_STACK_BYTES
        if len(adapters) < len(short) or len(short) < MIN_STACKED or not is_small:
            return [SingleProduct(segments)]
        stack = self._stack_of(adapters[0])
        products: list[Product] = [StackedProduct(short, stack.load_rows(adapters), stack.sites)]
        if len(short) < len(segments):
            products.append(SingleProduct([segment for segment in segments if segment.length > longest]))
        return products

    def _stack_of(self, adapter: PlacedAdapter) -> WeightStack:
        known = self._stacks.pop(id(adapter.layout), None)
        stack = WeightStack(adapter.layout, adapter.flat) if known is None else known[1]
        self._stacks[id(adapter.layout)] = adapter.layout, stack
        while len(self._stacks) > MAX_STACKS:
            del self._stacks[next(iter(self._stacks))]
        return stack


def _longest_stacked(lengths: Sequence[int]) -> int:
    """Return the segment length up to which stacking has the least total cost; 0 if no segment should be stacked."""
    short = sorted(length for length in lengths if length <= MAX_SHORT)
    costs = {length: num * length + SINGLE_ROWS * (len(short) - num) for num, length in enumerate(short, 1)}
    return min(costs, key=costs.__getitem__, default=0)
