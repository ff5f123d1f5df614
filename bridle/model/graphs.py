"""Short steps as graphs: all launches of a forward pass, captured once for each of some numbers of tokens, and then
asked for at once.

A step is computed as the next larger one that was captured. Those with adapters have graphs of their own, in which
every layer may add what adapters give. What has no graph, such as long chunks and images, is computed as ever.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.errors import InternalError
from bridle.load_progress import Report
from bridle.lora.ops import AdapterStep, Segment
from bridle.model.adapter_tiles import AdapterTiles
from bridle.model.adapters import ModelAdapters, check_complete
from bridle.model.attention import PagedAttention
from bridle.model.batch_inputs import PackedRow, PackedStep
from bridle.model.geometry import Geometry
from bridle.model.kernels import paged
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.rows import RowsKernel, Scratch, room_for_parts
from bridle.model.recorder import Recorder, Work
from bridle.model.runner import ModelRunner
from bridle.model.static_step import StaticStep, StepCapacity
from bridle.model.tensor_parallel import all_agree

_log = logging.getLogger(__name__)

#: The most tokens of a step that has a graph. Longer ones keep a GPU busy while its host asks for the next launch.
MOST_TOKENS = 512
#: ... and has adapters: each of its tokens may have another one.
MOST_ADAPTED_TOKENS = 64
_SIZES = (1, 2, 4, *range(8, 257, 8), *range(320, MOST_TOKENS + 1, 64))


def sizes_up_to(num_tokens: int) -> list[int]:
    """The steps that are captured, where none has more than `num_tokens` tokens."""
    return [size for size in _SIZES if size <= num_tokens]


def adapted_sizes_up_to(num_tokens: int) -> list[int]:
    """Likewise, of steps with adapters."""
    return sizes_up_to(min(num_tokens, MOST_ADAPTED_TOKENS))


@dataclass(frozen=True, slots=True)
class Graph:
    """A step of `size` tokens, to be computed at once."""

    size: int
    replay: Work


class StepGraphs:
    """The graphs of one model over its KV pool, which must be final and have a block more than the engine knows of."""

    def __init__(
        self,
        runner: ModelRunner,
        kernel: PagedKernel,
        geometry: Geometry,
        info: ExecutorInfo,
        recorder: Recorder,
        adapters: ModelAdapters | None = None,
    ) -> None:
        self._runner, self._kernel, self._recorder, self._adapters = runner, kernel, recorder, adapters
        self._cache = runner.attention.cache
        device, block_size = self._cache.device, self._cache.block_size
        sizes = sizes_up_to(info.max_num_batched_tokens)
        longest = min(info.max_model_len, info.num_blocks * block_size)
        kernel.seats.reserve(info.max_num_seqs + 1, -(-longest // block_size))
        self._tables = kernel.make_tables(device)
        room = StepCapacity(sizes[-1], min(room_for_parts(geometry), sizes[-1] * -(-longest // paged.CHUNK)))
        self._scratch = Scratch(room.num_works, geometry, device)
        self._step = StaticStep(kernel, room, block_size, self._cache.num_blocks - 1, device)
        self._logits: Tensor | None = None  # [T, V] for all graphs
        self._hidden: Tensor | None = None  # [T, hidden]
        self._graphs: list[Graph] = []  # the smallest first
        self._adapted: list[Graph] = []  # of steps with adapters, likewise
        self._tiles: AdapterTiles | None = None

    @property
    def sizes(self) -> list[int]:
        return [graph.size for graph in self._graphs]

    @property
    def adapted_sizes(self) -> list[int]:
        return [graph.size for graph in self._adapted]

    # -- a step --------------------------------------------------------------------------------------------------

    def takes(self, plan_rows: Sequence[PlanRow]) -> bool:
        return bool(self._adapted) or all(row.adapter is None for row in plan_rows)

    def pack(
        self,
        plan_rows: Sequence[PlanRow],
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        logits: Sequence[int],
        rows: list[PackedRow],
    ) -> PackedStep | None:
        """A step that a graph computes, its numbers on the way to the device; None where there is none for it."""
        segments = self._segments(plan_rows)
        graphs = self._adapted if segments else self._graphs
        at = bisect_left(graphs, len(ids), key=lambda graph: graph.size)
        if at == len(graphs) or not self._step.takes(rows):
            return None
        if segments and (self._tiles is None or not self._tiles.takes(segments)):
            return None
        if self._kernel.tables is not self._tables:
            _log.warning("steps run without CUDA graphs from now on: a step had too many sequences")
            self._graphs.clear()
            self._adapted.clear()
            return None
        graph = graphs[at]
        if not self._step.write(graph.size, ids, positions, slots, logits, rows):
            return None
        held = self._tiles.write(graph.size, segments) if segments and self._tiles is not None else None
        return replace(self._step.view(graph.size), rows=rows, replay=partial(self._replay, graph, len(logits), held))

    def _segments(self, plan_rows: Sequence[PlanRow]) -> list[Segment]:
        if self._adapters is None or all(row.adapter is None for row in plan_rows):
            return []
        return self._adapters.segments(plan_rows)

    def _replay(self, graph: Graph, num_logits: int, held: object) -> tuple[Tensor, Tensor | None]:
        """`held` is what the device reads by its address: memory that steps read stays until those that were begun are
        done, and nobody gives it back before."""
        graph.replay()
        del held
        assert self._logits is not None
        return self._logits[:num_logits], None if self._hidden is None else self._hidden[:num_logits]

    # -- capturing -----------------------------------------------------------------------------------------------

    def capture(self, sizes: Sequence[int], report: Report) -> None:
        """Capture steps of `sizes`, the largest first. Raises whatever says that one cannot be."""
        for number, size in enumerate(sorted(sizes, reverse=True)):
            report("capturing CUDA graphs", number / len(sizes))
            self._graphs.insert(0, self._captured(size))

    def capture_adapted(self, sizes: Sequence[int], report: Report) -> None:
        """The same for steps with adapters, once those without are captured."""
        self._tiles = None if self._adapters is None else self._tiles or self._adapters.tiles(MOST_ADAPTED_TOKENS)
        if self._adapters is None or self._tiles is None:
            raise InternalError("no kernel that a graph can hold multiplies adapters")
        for number, size in enumerate(sorted(sizes, reverse=True)):
            report("capturing CUDA graphs with adapters", number / len(sizes))
            self._tiles.write(size, ())
            adapted = self._tiles.step(size)
            with self._adapters.applied(adapted):
                self._adapted.insert(0, self._captured(size, adapted))

    def drop_adapted(self) -> None:
        """Let steps with adapters go without graphs."""
        self._adapted.clear()
        self._tiles = None

    @torch.inference_mode()
    def _captured(self, size: int, adapted: AdapterStep | None = None) -> Graph:
        assert self._step.write(size, (), (), (), (), ()), "a step of nobody's tokens has one work for each"
        step = self._step.view(size)
        kernel = RowsKernel(self._kernel, self._step.numbers(size), self._scratch)
        usual, self._runner.attention = self._runner.attention, PagedAttention(self._cache, kernel)
        try:
            self._make_outputs(step)
            return Graph(size, self._recorded(partial(self._compute, step, adapted)))
        finally:
            self._runner.attention = usual

    def _recorded(self, work: Work) -> Work:
        """The work, recorded by all ranks. Memory that lacks is no matter of agreeing: that rank ends."""
        replay, failure = None, None
        try:
            replay = self._recorder.record(work)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failure = error
        if not all_agree(replay is not None, self._cache.device) or replay is None:
            raise failure or InternalError("another rank cannot capture it")
        return replay

    def _make_outputs(self, step: PackedStep) -> None:
        """Memory for what the largest step gives; smaller ones give less."""
        if self._logits is None:
            logits, hidden = self._runner.run(step), self._runner.hidden
            with torch.inference_mode(False):
                self._logits = torch.empty_like(logits)
                self._hidden = None if hidden is None else torch.empty_like(hidden)

    def _compute(self, step: PackedStep, adapted: AdapterStep | None) -> None:
        assert self._logits is not None
        if adapted is not None:
            adapted.num_added = 0
        logits = self._runner.run(step)
        if adapted is not None:
            check_complete(adapted)
        self._logits[: step.num_tokens].copy_(logits)
        if self._hidden is not None and self._runner.hidden is not None:
            self._hidden[: step.num_tokens].copy_(self._runner.hidden)
