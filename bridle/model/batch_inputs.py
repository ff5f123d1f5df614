"""Packs the sequences of a step into one row of tokens, as input of the model and of the attention kernels. All
sequences are concatenated without padding. Each step builds the packed row from the executor's copies of the sequences.
The packed row contains no KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bridle.engine.multimodal.multimodal_inputs import Runs
from bridle.engine.scheduling.step_plan import PlanRow, StateSave
from bridle.model.h2d_copies import aligned, in_sections, upload
from bridle.model.sequence_state import CachedRequestState, Span


@dataclass(slots=True)
class PackedRow:
    """The tokens of one sequence within a step: `length` packed tokens from `offset` on, at positions `context -
    length` to `context - 1`. Each pair (first, end) in `mutual` is a range of positions that attend to each other in
    both directions. The sequence's recurrent state is in slot `state`, and `saves` lists the copies of this state that
    the step must make."""

    offset: int
    length: int
    context: int
    _spans: list[Span]  # empty until `spans` is called
    mirror: CachedRequestState
    mutual: tuple[tuple[int, int], ...] = ()
    block_size: int = 1
    state: int = -1
    saves: tuple[StateSave, ...] = ()

    @property
    def spans(self) -> list[Span]:
        """Return the contiguous runs of cache slots that hold the sequence's positions 0 to `context - 1`. Only CPU
        kernels read cache spans, because a sequence in scattered blocks has many spans."""
        if not self._spans:
            self._spans = self.mirror.spans(0, self.context, self.block_size)
        return self._spans

    @property
    def start(self) -> int:
        return self.context - self.length

    def pieces(self) -> Iterator[tuple[int, bool, list[int]]]:
        """Yield the pieces of the row: length, whether the recurrent state starts from zero, and the slots to which the
        state is saved. A piece ends where the state is saved, or at the end of the row."""
        begin = self.start
        ends = {save.position for save in self.saves if begin < save.position < self.context}
        for end in sorted(ends | {self.context}):
            yield end - begin, begin == 0, [save.slot for save in self.saves if save.position == end]
            begin = end

    def visible(self, window: int | None) -> tuple[int, list[Span]]:
        """Return the first position that any token of the row can attend to, and the cache spans from that position on.
        The window does not limit tokens that attend to each other in both directions."""
        first = max(0, self.start - window + 1) if window is not None else 0
        if self.mutual:
            first = min(first, self.mutual[0][0])
        if first == 0:
            return 0, self.spans
        spans, skip = [], first
        for slot, length in self.spans:
            if skip < length:
                spans.append((slot + skip, length - skip))
            skip = max(0, skip - length)
        return first, spans


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Feature rows `first` to `first+length-1` of the image `key`, which replace the packed tokens from `offset` on."""

    key: bytes
    first: int
    offset: int
    length: int


@dataclass(slots=True)
class PackedStep:
    """The inputs of one forward pass over T tokens, R of which give logits."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], or [3, 1, T] if a token belongs to an image
    slots: Tensor  # [T] where the K and V of each token are stored
    logits_rows: Tensor  # [R] indices into T
    rows: list[PackedRow]
    block_size: int
    words: Tensor | None = None  # int32: further input of the attention kernel for this step
    sights: list[AttentionSpan] = field(default_factory=list)
    replay: Callable[[], tuple[Tensor, Tensor | None]] | None = None  # a CUDA graph; returns logits and hidden rows

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


#: Returns the further input (int32) that an attention kernel needs on the device for a step's rows.
Words = Callable[[Sequence[PackedRow], int], npt.NDArray[np.int32]]


class Packer(Protocol):
    """Interface for packing steps that are computed in a special way, such as by CUDA graphs."""

    def takes(self, plan_rows: Sequence[PlanRow]) -> bool:
        """Return whether this packer may be able to pack a step of these rows."""
        ...

    def pack(
        self,
        plan_rows: Sequence[PlanRow],
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        logits: Sequence[int],
        rows: list[PackedRow],
    ) -> PackedStep | None:
        """Return the step of these tokens; None if this packer cannot pack them."""
        ...


@dataclass(slots=True)
class _Columns:
    """The inputs of a step as lists: the id, position and KV slot of each token, and the tokens that give logits."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)

    def add(self, plan: PlanRow, mirror: CachedRequestState, block_size: int) -> PackedRow:
        """Append the tokens of one sequence."""
        start, length = plan.start, plan.num_scheduled
        end, offset = start + length, len(self.ids)
        if length == 1:
            self.ids.append(mirror.tokens[start])
            self.positions.append(start)
            self.slots.append(mirror.blocks[start // block_size] * block_size + start % block_size)
        else:
            self.ids.extend(mirror.tokens[start:end])
            self.positions.extend(range(start, end))
            for index in range(start // block_size, -(-end // block_size)):
                slot = (mirror.blocks[index] - index) * block_size  # of position 0, if all blocks were like this one
                first, last = max(start, index * block_size), min(end, (index + 1) * block_size)
                self.slots.extend(range(slot + first, slot + last))
        self.logits.extend(range(offset + length - plan.num_logits, offset + length))
        mutual = _mutual(mirror, start, end)
        return PackedRow(offset, length, end, [], mirror, mutual, block_size, plan.state, plan.saves)


def pack_step(
    plan_rows: Sequence[PlanRow],
    mirrors: Sequence[CachedRequestState],
    block_size: int,
    device: torch.device,
    words: Words | None = None,
    packer: Packer | None = None,
) -> PackedStep:
    """Pack `plan_rows` into one step. `mirrors` are the executor's copies of the sequences in these rows, in the same
    order, after the plan was applied. The function `words` returns additional input for the attention kernel. `packer`
    packs the step if it supports a step of these rows."""
    columns = _Columns()
    rows = [columns.add(plan, mirror, block_size) for plan, mirror in zip(plan_rows, mirrors, strict=True)]
    if packer is not None and packer.takes(plan_rows):
        apart = packer.pack(plan_rows, columns.ids, columns.positions, columns.slots, columns.logits, rows)
        if apart is not None:
            return apart
    return _upload(columns, rows, block_size, device, None if words is None else words(rows, block_size))


def _upload(
    columns: _Columns, rows: list[PackedRow], block_size: int, device: torch.device, extra: npt.NDArray[np.int32] | None
) -> PackedStep:
    """Copy the inputs of a step to the device in one transfer."""
    parts = (columns.ids, columns.positions, columns.slots, columns.logits)
    arrays = [np.array(values, np.int64) for values in parts]
    if extra is not None:
        arrays.append(np.pad(extra, (0, len(extra) % 2)).view(np.int64))
    packed = upload(in_sections(arrays), device)
    total, num_logits = len(columns.ids), len(columns.logits)
    step = aligned(total, 8)
    end = 3 * step + aligned(num_logits, 8)
    seeing = [row for row in rows if row.mirror.media]
    return PackedStep(
        input_ids=packed[:total].unsqueeze(0),
        position_ids=_places(rows, device) if _have_grids(seeing) else packed[step : step + total].unsqueeze(0),
        slots=packed[2 * step : 2 * step + total],
        logits_rows=packed[3 * step : 3 * step + num_logits],
        rows=rows,
        block_size=block_size,
        words=None if extra is None else packed[end:].view(torch.int32)[: len(extra)],
        sights=[sight for row in seeing for sight in _sights(row)],
    )


def _sights(row: PackedRow) -> Iterator[AttentionSpan]:
    for run in row.mirror.seen(row.start, row.context):
        first, last = max(run.position, row.start), min(run.end, row.context)
        yield AttentionSpan(run.key, run.offset + first - run.position, row.offset + first - row.start, last - first)


def _mutual(mirror: CachedRequestState, start: int, end: int) -> tuple[tuple[int, int], ...]:
    if not mirror.media:
        return ()
    return tuple((run.position, run.end) for run in mirror.seen(start, end) if run.is_mutual)


def _have_grids(rows: Sequence[PackedRow]) -> bool:
    return any(run.grid is not None for row in rows for run in row.mirror.media)


def _places(rows: Sequence[PackedRow], device: torch.device) -> Tensor:
    """Return positions [3, 1, T] in time, height and width. A text token has the same position in all three dimensions.
    An image token has its position in the image's grid."""
    parts = [grid_positions(row.mirror.media, row.start, row.context) for row in rows]
    return upload(np.concatenate(parts, 1).reshape(-1), device).view(3, 1, -1)


def grid_positions(runs: Runs, start: int, end: int) -> npt.NDArray[np.int64]:
    """Return positions [3, end-start] of the tokens from `start` on. An image occupies as many positions as its largest
    grid dimension: times, rows or columns. The token after an image has the position after the image's largest
    position."""
    places = np.tile(np.arange(start, end), (3, 1))
    shift = 0  # difference between position and index for tokens after the runs so far
    for run in runs:
        if run.grid is None or run.position >= end:
            continue
        first, last = max(run.position, start), min(run.end, end)
        if first < last:
            time, row, column = np.unravel_index(np.arange(first, last) - run.position, run.grid)
            cells = np.stack((_paced(time, run.pace), row, column))
            places[:, first - start : last - start] = run.position + shift + cells
        last_time = int(_paced(np.array(run.grid[0] - 1), run.pace))
        shift += max(last_time + 1, run.grid[1], run.grid[2]) - run.length
        places[:, max(run.end - start, 0) :] = np.arange(max(run.end, start), end) + shift
    return places


def _paced(times: npt.NDArray[np.int64], pace: float) -> npt.NDArray[np.int64]:
    """Return `times` multiplied by `pace` and rounded down, with the float32 precision of transformers."""
    return (times.astype(np.float32) * np.float32(pace)).astype(np.int64)
