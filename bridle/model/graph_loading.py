"""Captures a model's CUDA graphs while it is loaded, and compares the results of each graph with the same step without
a graph.

If the steps of one kind cannot be captured, or their results differ, steps of this kind run without graphs, and the log
says why. If the graphs of the first kind of step fail, all steps run without graphs. With tensor parallelism, either
all ranks use graphs or no rank does, because each rank waits for all other ranks. A rank that lacks the memory for
graphs ends with an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from bridle.config import ModelConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.load_progress import Report, silent
from bridle.model import tensor_parallel
from bridle.model.adapters import ModelAdapters
from bridle.model.batch_inputs import pack_step
from bridle.model.dense_layer import is_close
from bridle.model.geometry import Geometry
from bridle.model.graph_kinds import KINDS, GraphKind
from bridle.model.graphs import StepGraphs
from bridle.model.kernels import paged
from bridle.model.kernels.paged import PagedKernel
from bridle.model.memory import free_memory, show_bytes
from bridle.model.recorder import CudaRecorder, Recorder
from bridle.model.runner import ModelRunner
from bridle.model.sequence_state import CachedRequestState

_log = logging.getLogger(__name__)


class GraphLoader:
    """Captures the graphs of one model. The function `recorder` returns a new graph recorder that holds no memory. If
    `adapters` is given, graphs for steps with adapters are captured, too."""

    def __init__(
        self,
        runner: ModelRunner,
        kernel: PagedKernel,
        geometry: Geometry,
        recorder: Callable[[], Recorder],
        adapters: ModelAdapters | None = None,
    ) -> None:
        self._runner, self._kernel, self._geometry, self._recorder = runner, kernel, geometry, recorder
        self._adapters = adapters
        self._present: Recorder | None = None

    def load(self, info: ExecutorInfo, report: Report = silent) -> StepGraphs | None:
        """Capture the graphs for the model's current KV pool and return them; None if steps run without graphs."""
        graphs: StepGraphs | None = None
        for kind, sizes in self._kinds(info):
            began, before = time.monotonic(), self._free()
            graphs, problem = self._added(graphs, kind, sizes, info, report)
            if problem is None:
                taken = show_bytes(max(before - self._free(), 0))
                _log.info(
                    "captured %d CUDA graphs of up to %d tokens%s in %.1f s; they use %s",
                    *(len(sizes), sizes[-1], kind, time.monotonic() - began, taken),
                )
                continue
            _log.warning("steps%s run without CUDA graphs: %s", kind, problem)
            if graphs is None:
                self._let_go()
                return None
            graphs.drop(kind)
            self._free()
        return graphs

    def _added(
        self, graphs: StepGraphs | None, kind: GraphKind, sizes: list[int], info: ExecutorInfo, report: Report
    ) -> tuple[StepGraphs | None, str | None]:
        """Capture the graphs of one kind, and add them to `graphs`. Return the graphs, and the reason why this kind has
        no graphs (None: it has graphs)."""
        present = graphs
        try:
            present = self._begin(info) if present is None else present
            with self._trial_of(kind) as trial:
                present.capture(kind, sizes, report)
                problem = find_problem(present, self._runner, info, trial)
        except Exception as failure:  # a library that synchronizes with the device, a driver, no memory
            problem = _reason(failure)
        return (present if problem is None else graphs), problem

    def _kinds(self, info: ExecutorInfo) -> Iterator[tuple[GraphKind, list[int]]]:
        """Yield the kinds of steps that can occur, with the step sizes to capture."""
        for kind in KINDS:
            sizes = kind.sizes(info.max_num_batched_tokens)
            if sizes and (self._adapters is not None or not kind.has_adapters):
                yield kind, sizes

    @contextmanager
    def _trial_of(self, kind: GraphKind) -> Iterator[Trial]:
        """Yield the trial of a kind. If the graphs of this kind have adapters, a random adapter is on the device inside
        the `with` block."""
        with nullcontext("") if self._adapters is None or not kind.has_adapters else self._adapters.on_trial() as key:
            yield Trial(kind, self._adapters if kind.has_adapters else None, key)

    def measure(self, info: ExecutorInfo) -> int:
        """Return the estimated bytes of all graphs. For each kind, the two largest graphs are captured and measured.
        Every smaller graph counts as much as the second largest graph of its kind. A kind that cannot be captured
        counts 0; `load` then logs the reason."""
        try:
            return self._measured(info)
        finally:
            self._let_go()

    def _measured(self, info: ExecutorInfo) -> int:
        graphs: StepGraphs | None = None
        num_bytes = 0
        for kind, sizes in self._kinds(info):
            before = self._free()
            try:
                graphs = self._begin(info) if graphs is None else graphs
                num_bytes += self._taken(sizes, partial(graphs.capture, kind), before)
            except Exception as failure:
                _log.debug("no CUDA graphs were captured%s: %s", kind, _reason(failure))
                if not num_bytes:
                    return 0
        return num_bytes

    def _taken(self, sizes: list[int], capture: Callable[[list[int], Report], None], before: int) -> int:
        """Return the estimated bytes of graphs of all `sizes`, from the two largest, which this function captures.
        `before` bytes of device memory were free before the captures."""
        free = [before]
        for size in sizes[:-3:-1]:
            capture([size], silent)
            free.append(self._free())
        taken = [before - after for before, after in pairwise(free)]
        return max(taken[0] + taken[-1] * (len(sizes) - 1), 0)

    def _begin(self, info: ExecutorInfo) -> StepGraphs:
        self._present = self._recorder()
        return StepGraphs(self._runner, self._kernel, self._geometry, info, self._present, self._adapters)

    def _let_go(self) -> None:
        """Release the memory of the graphs that were captured only to measure their size."""
        present, self._present = self._present, None
        if present is not None:
            present.close()
        self._free()

    def _free(self) -> int:
        """Return the free memory of the device, after releasing torch's cached memory."""
        return free_memory(self._runner.attention.cache.device)


def graph_loader(
    config: ModelConfig, runner: ModelRunner, geometry: Geometry, adapters: ModelAdapters | None = None
) -> GraphLoader | None:
    """Return a loader of the model's CUDA graphs; None if steps run without graphs. If there is no loader, the log has
    the reason, unless graphs are disabled by the operator or not supported by the device. Graphs for steps with
    adapters are included if memory is reserved for adapters."""
    device, kernel = runner.attention.cache.device, runner.attention.kernel
    if device.type != "cuda" or config.enforce_eager:
        return None
    if isinstance(kernel, PagedKernel) and (missing := _missing(geometry)) is None:
        may_come = config.reserved_memory != 0
        return GraphLoader(runner, kernel, geometry, lambda: CudaRecorder(device), adapters if may_come else None)
    lacking = missing if isinstance(kernel, PagedKernel) else f"they need kernel 'paged', not {kernel.name!r}"
    _log.info("steps run without CUDA graphs: %s", lacking)
    return None


def _reason(failure: Exception) -> str:
    """Return the failure of a capture as text. With tensor parallelism, raise a lack of memory instead, because the
    other ranks would wait for this rank."""
    if tensor_parallel.num_ranks() > 1 and isinstance(failure, torch.OutOfMemoryError):
        raise failure
    return f"{type(failure).__name__}: {failure}"


def _missing(geometry: Geometry) -> str | None:
    if geometry.states:
        return "the model has recurrent layers"
    if geometry.indexes:
        return "the model selects keys by an index, or compresses them"
    if any(max(shape.key_dim, shape.value_dim) > paged.MAX_DIM for shape in geometry.layers.values()):
        return f"they take heads up to {paged.MAX_DIM} wide"
    return None


# -- trying ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """The kind of CUDA graphs to compare with steps without graphs. If `adapters` is given, every other sequence has
    the adapter called `key`."""

    kind: GraphKind
    adapters: ModelAdapters | None = None
    key: str = ""


def find_problem(graphs: StepGraphs, runner: ModelRunner, info: ExecutorInfo, trial: Trial) -> str | None:
    """Compare each graph of a trial with the same step without a graph. Return a description of the problem, or
    None."""
    for size in graphs.sizes_of(trial.kind):
        plans, mirrors = _step_of(trial.kind, size, info)
        if trial.adapters is not None:
            plans = [replace(plan, adapter=None if number % 2 else trial.key) for number, plan in enumerate(plans)]
        want, have = (_logits(plans, mirrors, runner, info, packer, trial.adapters) for packer in (None, graphs))
        if not tensor_parallel.all_agree(is_close(want, have), want.device):
            return f"the one of {size} tokens gives other logits than the step without"
    return None


def _step_of(kind: GraphKind, size: int, info: ExecutorInfo) -> tuple[list[PlanRow], list[CachedRequestState]]:
    """Build the rows of a trial step from chunks of random prompts, which fill a graph as far as there are blocks. In
    graphs of more than two tokens, the trial step leaves one token unused. The first chunk of the step is long if the
    kind of graph allows long chunks."""
    generator = torch.Generator().manual_seed(size)
    left, block, logits_left = size - (size > 2), 0, kind.shape(size, info.max_num_seqs).num_logits
    plans: list[PlanRow] = []
    mirrors: list[CachedRequestState] = []
    while left and len(plans) < info.max_num_seqs:
        most = 3 * size // 4 if kind.has_long and not plans else paged.MAX_SHORT
        length = min(left, most, info.max_model_len, (info.num_blocks - block) * info.block_size)
        if length < 1:
            break
        mirror, num_blocks = CachedRequestState(), -(-length // info.block_size)
        mirror.tokens = torch.randint(info.vocab_size, (length,), generator=generator).tolist()
        mirror.add_blocks(range(block, block + num_blocks))
        plans.append(PlanRow(len(plans), 0, length, min(length, logits_left)))
        mirrors.append(mirror)
        left, block, logits_left = left - length, block + num_blocks, logits_left - plans[-1].num_logits
    return plans, mirrors


def _logits(
    plans: list[PlanRow],
    mirrors: list[CachedRequestState],
    runner: ModelRunner,
    info: ExecutorInfo,
    packer: StepGraphs | None,
    adapters: ModelAdapters | None,
) -> Tensor:
    """Clear the cache, and return the logits of a step."""
    cache = runner.attention.cache
    cache.clear(sum(len(mirror.blocks) for mirror in mirrors))
    words = getattr(runner.attention.kernel, "words", None)
    step = pack_step(plans, mirrors, info.block_size, cache.device, words, packer)
    assert (step.replay is None) is (packer is None), "a trial fits into its graph"
    adapted = None if adapters is None or step.replay is not None else adapters.begin_step(plans)
    with nullcontext() if adapters is None or adapted is None else adapters.applied(adapted):
        return runner.run(step).clone()
