"""Runs steps as CUDA graphs. All launches of a forward pass are captured once for each of several step sizes, and
replayed with one call. A step runs in the smallest graph of its kind that it fits into. Graphs for long chunks are
separate, because they need space for these chunks. Graphs for adapters are separate as well, because they launch
adapter kernels in every layer. Steps that fit no graph, such as steps with more tokens or with images, are computed as
usual.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
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
from bridle.model.graph_kinds import KINDS, MOST_TOKENS, GraphKind, most_tiles
from bridle.model.kernels import paged
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kernels.rows import RowsKernel, Scratch, StepShape, room_for_parts
from bridle.model.recorder import Recorder, Work
from bridle.model.runner import ModelRunner
from bridle.model.static_step import StaticStep, StepCapacity
from bridle.model.tensor_parallel import all_agree

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step with the capacity `shape`, which `replay` computes with one call."""

    shape: StepShape
    replay: Work

    @property
    def size(self) -> int:
        return self.shape.num_tokens


class StepGraphs:
    """The graphs of one model and its KV pool. The KV pool must not be reallocated later, and must have one block more
    than the engine uses."""

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
        self._max_seqs = info.max_num_seqs
        largest = GraphKind().sizes(info.max_num_batched_tokens)[-1]
        longest = min(info.max_model_len, info.num_blocks * block_size)
        kernel.seats.reserve(info.max_num_seqs + 1, -(-longest // block_size))
        self._tables = kernel.make_tables(device)
        num_works = min(room_for_parts(geometry), largest * -(-longest // paged.CHUNK))
        room = StepCapacity(GraphKind(has_long=True).shape(largest, self._max_seqs), num_works)
        self._scratch = Scratch(room.num_works, geometry, device)
        self._step = StaticStep(kernel, room, block_size, self._cache.num_blocks - 1, device)
        self._logits: Tensor | None = None  # [T, V], shared by all graphs
        self._hidden: Tensor | None = None  # [T, hidden]
        self._graphs: dict[GraphKind, list[Graph]] = {kind: [] for kind in KINDS}  # the smallest first
        self._tiles: AdapterTiles | None = None

    def sizes_of(self, kind: GraphKind) -> list[int]:
        """Return the sizes, in tokens, of the captured steps of a kind."""
        return [graph.size for graph in self._graphs[kind]]

    # -- a step --------------------------------------------------------------------------------------------------

    def takes(self, plan_rows: Sequence[PlanRow]) -> bool:
        return self._tiles is not None or all(row.adapter is None for row in plan_rows)

    def pack(
        self,
        plan_rows: Sequence[PlanRow],
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        logits: Sequence[int],
        rows: list[PackedRow],
    ) -> PackedStep | None:
        """Return a step that a graph computes, after starting the copy of its inputs to the device. Return None if the
        step fits no graph."""
        segments = self._segments(plan_rows)
        graph = self._graph_for(len(ids), rows, segments)
        if graph is None or not self._step.write(graph.shape, ids, positions, slots, logits, rows):
            return None
        held = self._tiles.write(most_tiles(graph.size), segments) if segments and self._tiles is not None else None
        return replace(self._step.view(graph.shape), rows=rows, replay=partial(self._replay, graph, len(logits), held))

    def _graph_for(self, num_tokens: int, rows: Sequence[PackedRow], segments: Sequence[Segment]) -> Graph | None:
        """Return the smallest graph that these rows fit into, or None."""
        kind = GraphKind(any(row.length > paged.MAX_SHORT for row in rows), bool(segments))
        graphs = self._graphs[kind]
        at = bisect_left(graphs, num_tokens, key=lambda graph: graph.size)
        if at == len(graphs) or not self._step.takes(rows):
            return None
        graph = graphs[at]
        if segments and (self._tiles is None or not self._tiles.takes(segments, most_tiles(graph.size))):
            return None
        if self._kernel.tables is not self._tables:
            _log.warning("steps run without CUDA graphs from now on: a step had too many sequences")
            for kind in KINDS:
                self.drop(kind)
            return None
        return graph

    def _segments(self, plan_rows: Sequence[PlanRow]) -> list[Segment]:
        if self._adapters is None or all(row.adapter is None for row in plan_rows):
            return []
        return self._adapters.segments(plan_rows)

    def _replay(self, graph: Graph, num_logits: int, held: object) -> tuple[Tensor, Tensor | None]:
        """Replay a graph. `held` keeps the adapter weights alive that the graph reads by address, until the graph is
        launched."""
        graph.replay()
        del held
        assert self._logits is not None
        return self._logits[:num_logits], None if self._hidden is None else self._hidden[:num_logits]

    # -- capturing -----------------------------------------------------------------------------------------------

    def capture(self, kind: GraphKind, sizes: Sequence[int], report: Report) -> None:
        """Capture steps of these sizes (in tokens), the largest first. The first kind in `KINDS` must be captured
        before the other kinds. If a step cannot be captured, this method raises the error of the capture."""
        for number, size in enumerate(sorted(sizes, reverse=True)):
            report(f"capturing CUDA graphs{kind}", number / len(sizes))
            adapted = self._adapted(size) if kind.has_adapters else None
            with nullcontext() if adapted is None or self._adapters is None else self._adapters.applied(adapted):
                self._graphs[kind].insert(0, self._captured(kind.shape(size, self._max_seqs), adapted))

    def _adapted(self, size: int) -> AdapterStep:
        """Return the `AdapterStep` for capturing a step of `size` tokens, at first without adapters."""
        if self._tiles is None and self._adapters is not None:
            self._tiles = self._adapters.tiles(most_tiles(MOST_TOKENS))
        if self._tiles is None:
            raise InternalError("steps with adapters need a CUDA graph, but no LoRA kernel supports graphs")
        self._tiles.write(most_tiles(size), ())
        return self._tiles.step(size, most_tiles(size))

    def drop(self, kind: GraphKind) -> None:
        """Remove the graphs of a kind: such steps are computed without graphs from now on."""
        self._graphs[kind].clear()
        if not any(self._graphs[each] for each in KINDS if each.has_adapters):
            self._tiles = None

    @torch.inference_mode()
    def _captured(self, shape: StepShape, adapted: AdapterStep | None) -> Graph:
        assert self._step.write(shape, (), (), (), (), ()), "a step of nobody's tokens has one work for each"
        step = self._step.view(shape)
        kernel = RowsKernel(self._kernel, self._step.numbers(shape), self._scratch)
        usual, self._runner.attention = self._runner.attention, PagedAttention(self._cache, kernel)
        try:
            self._make_outputs(step)
            return Graph(shape, self._recorded(partial(self._compute, step, adapted)))
        finally:
            self._runner.attention = usual

    def _recorded(self, work: Work) -> Work:
        """Record `work` in all ranks, and return its replay function. A rank that runs out of memory raises this error
        without asking the other ranks."""
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
        """Allocate memory for the logits and hidden states of the largest step; smaller steps use a part of it."""
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
        self._logits[: len(logits)].copy_(logits)
        if self._hidden is not None and self._runner.hidden is not None:
            self._hidden[: len(logits)].copy_(self._runner.hidden)
