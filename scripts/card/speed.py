"""Benchmark of decoding and prompts on a GPU. bridle is compared with transformers' `generate` and `generate_batch`,
with a bare loop over bridle's own kernels without an engine, and with the limits of memory and arithmetic units."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from bridle.bench.baselines import BaselineRun, ContinuousPeer, EnginePeer, GeneratePeer, Peer, Stopwatch
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.errors import OutOfBlocks
from bridle.model.batch_inputs import Packer, pack_step
from bridle.model.executor import LocalExecutor
from bridle.model.sequence_state import CachedRequestState
from scripts.card.models import SHAPES, Sizes, make_executor, make_model
from scripts.card.probe import Rates

Figures = Iterator[dict[str, Any]]
#: Steps before the clock starts: kernels are compiled, and the batch is full.
WARM_UP = 6
#: Sequences of a step in which a prompt joins those that decode.
_JOINED = 64
#: Tokens of a step and of a page of `generate_batch`.
_PEER_STEP, _PEER_PAGE = 512, 32


@dataclass(frozen=True, slots=True)
class Race:
    """Scale of the measurement: batch sizes and contexts of decoding, prompts as (number, tokens), and steps."""

    model: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    num_steps: int
    peer_steps: int
    max_tokens: int
    filtered: tuple[int, ...] = ()  # batches that are also drawn with top-p
    joining: int = 8  # tokens of a prompt that joins others

    def scenes(self) -> list[tuple[int, int]]:
        """Return the batch sizes and contexts whose tokens fit into the KV cache."""
        pairs = ((batch, context) for context in self.contexts for batch in self.batches)
        return [(batch, context) for batch, context in pairs if self._needed(batch, context) <= self.max_tokens]

    def _needed(self, batch: int, context: int) -> int:
        """Return the tokens of KV that a scene needs. A sequence continues to sample while the prompts of others are
        read, in many steps."""
        reading = batch * context // 2_048 + batch
        return batch * (context + reading + self.num_steps + 2 * WARM_UP + 16)

    @property
    def num_tokens(self) -> int:
        """The tokens of KV for the largest scene or set of prompts, because they are measured one at a time. Raises
        `OutOfBlocks` if the KV is too small for every scene."""
        if not self.scenes():
            raise OutOfBlocks(f"there is room for {self.max_tokens} tokens, less than the smallest scene takes")
        prompts = (count * (length + 16) for count, length in self.prompts)
        return max(*(self._needed(*scene) for scene in self.scenes()), *prompts)


class BareLoop:
    """The bare loop: bridle's kernels and graphs over bridle's cache, without an engine. Every sequence continues with
    its most probable token. No request starts or ends, and the host reads the tokens only at the end."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._runner, self._size = executor.runner, executor.info.block_size
        self._device = torch.device(executor.info.device)
        self.on_gpu = self._device.type == "cuda"
        self.has_graph = False  # the last step's

    def run(self, batch: int, context: int, num_steps: int) -> BaselineRun:
        """Run `num_steps` decode steps of `batch` sequences after `context` tokens; the content of their KV does not
        matter. The outputs do not include tokens that were sampled before the clock started."""
        mirrors = [CachedRequestState() for _ in range(batch)]
        length = context + num_steps + WARM_UP
        needed = -(-length // self._size)
        for number, mirror in enumerate(mirrors):
            mirror.tokens = [3] * length
            mirror.add_blocks(range(number * needed, (number + 1) * needed))
        last: torch.Tensor | None = None
        for step in range(WARM_UP):
            last = self._step(mirrors, context + step, last)
        watch, drawn = Stopwatch(), []
        for step in range(WARM_UP, WARM_UP + num_steps):
            last = self._step(mirrors, context + step, last)
            drawn.append(last)
        return watch.stop(torch.stack(drawn, 1).tolist())

    def joined(self, lengths: list[int], context: int, num_steps: int, *, has_graphs: bool) -> BaselineRun:
        """Run the same step repeatedly: prompt chunks of these lengths, each after `context` tokens."""
        mirrors = [CachedRequestState() for _ in lengths]
        needed = [-(-(context + length) // self._size) for length in lengths]
        for mirror, length, first, count in zip(mirrors, lengths, accumulate(needed, initial=0), needed, strict=False):
            mirror.tokens = [3] * (context + length)
            mirror.add_blocks(range(first, first + count))
        rows = [PlanRow(number, context, length, num_logits=1) for number, length in enumerate(lengths)]
        packer = self._runner.graphs if has_graphs else None
        for _ in range(WARM_UP):
            self._run(rows, mirrors, packer)
        watch = Stopwatch()
        for _ in range(num_steps):
            self._run(rows, mirrors, packer)
        return watch.stop([])

    def _run(self, rows: list[PlanRow], mirrors: list[CachedRequestState], packer: Packer | None) -> None:
        words = getattr(self._runner.attention.kernel, "words", None)
        step = pack_step(rows, mirrors, self._size, self._device, words, packer)
        self.has_graph = step.replay is not None
        self._runner.run(step)

    def _step(self, mirrors: list[CachedRequestState], position: int, last: torch.Tensor | None) -> torch.Tensor:
        rows = [PlanRow(number, position, 1, num_logits=1) for number in range(len(mirrors))]
        words = getattr(self._runner.attention.kernel, "words", None)
        step = pack_step(rows, mirrors, self._size, self._device, words, self._runner.graphs)
        self.has_graph = step.replay is not None
        if last is not None and self.has_graph:
            step.input_ids[0, : len(mirrors)].copy_(last)  # where the graph reads them
        elif last is not None:
            step.input_ids = last.view(1, -1)
        return self._runner.run(step).argmax(-1)


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of arbitrary tokens, different for each prompt."""
    return [
        [3 + (number * 7_919 + place * 31) % (vocab_size - 3) for place in range(length)] for number in range(count)
    ]


def peers(plan: Race, device: torch.device, dtype: torch.dtype, has_time: Callable[[], bool]) -> Figures:
    """Yield transformers' figures of one model; figures for which no time remains are left out."""
    yield from _generated(plan, device, dtype, has_time)
    gc.collect()  # or there would be two models, and a cache


def race(plan: Race, device: torch.device, dtype: torch.dtype, rates: Rates, has_time: Callable[[], bool]) -> Figures:
    """Yield bridle's figures of one model; figures for which no time remains are left out."""
    executor, sizes = make_executor(plan.model, device, dtype, num_tokens=plan.num_tokens, num_seqs=max(plan.batches))
    peer, loop = EnginePeer(executor), BareLoop(executor)
    vocab_size = executor.info.vocab_size
    executor.runner.attention.cache.clear(executor.info.num_blocks)
    try:
        for batch, context in plan.scenes():
            if has_time():
                yield _decoded(peer, loop, sizes, rates, plan, batch, context, vocab_size)
        if has_time():
            yield prompt_joins(loop, plan)
        for batch in plan.filtered:
            if has_time() and (batch, min(plan.contexts)) in plan.scenes():
                yield _filtered(peer, plan, prompts_of(batch, min(plan.contexts), vocab_size))
        for count, length in plan.prompts:
            if has_time():
                yield _read(peer, sizes, rates, prompts_of(count, length, vocab_size))
    finally:
        peer.close()


def _decoded(
    peer: EnginePeer,
    loop: BareLoop,
    sizes: Sizes,
    rates: Rates,
    plan: Race,
    batch: int,
    context: int,
    vocab_size: int,
) -> dict[str, Any]:
    peer.start(prompts_of(batch, context, vocab_size), plan.num_steps + WARM_UP)
    peer.advance_at_once(WARM_UP)
    run = peer.advance_at_once(plan.num_steps)
    peer.finish()
    bare = loop.run(batch, context, plan.num_steps)
    # Both have graphs, or the ratio says nothing of the engine.
    lacks_graph = not loop.has_graph and loop.on_gpu
    floor = (sizes.step_bytes + sizes.token_bytes * batch * (context + plan.num_steps / 2)) / rates.copy_bytes
    step = run.seconds / plan.num_steps
    return {
        "what": "decode",
        "peer": "bridle",
        "batch": batch,
        "context": context,
        "tokens_per_second": batch / step,
        "step_ms": 1e3 * step,
        "cpu_ms": 1e3 * run.cpu_seconds / plan.num_steps,
        "bare_step_ms": 1e3 * bare.seconds / plan.num_steps,
        "bare_cpu_ms": 1e3 * bare.cpu_seconds / plan.num_steps,
        "over_bare_loop": bare.seconds / run.seconds,
        "floor_ms": 1e3 * floor,
        "floor_share": floor / step,
        "failed": "the bare loop runs without CUDA graphs" if lacks_graph else None,
    }


def prompt_joins(loop: BareLoop, plan: Race) -> dict[str, Any]:
    """Compare steps in which a prompt joins decoding sequences, with CUDA graphs and without."""
    batch, context = max(scene for scene in plan.scenes() if scene[0] <= _JOINED)
    lengths = [*[1] * (batch - 1), plan.joining]
    graph = loop.joined(lengths, context - plan.joining, plan.num_steps, has_graphs=True)
    lacks_graph = not loop.has_graph and loop.on_gpu
    eager = loop.joined(lengths, context - plan.joining, plan.num_steps, has_graphs=False)
    return {
        "what": "a prompt joins",
        "batch": batch,
        "context": context,
        "tokens": plan.joining,
        "step_ms": 1e3 * graph.seconds / plan.num_steps,
        "eager_step_ms": 1e3 * eager.seconds / plan.num_steps,
        "failed": "a step with a prompt runs without CUDA graphs" if lacks_graph else None,
    }


def _filtered(peer: EnginePeer, plan: Race, prompts: list[list[int]]) -> dict[str, Any]:
    """Measure decoding with a temperature and top-p."""
    peer.start(prompts, plan.num_steps + WARM_UP, top_p=0.95)
    peer.advance_at_once(WARM_UP)
    step = peer.advance_at_once(plan.num_steps).seconds / plan.num_steps
    peer.finish()
    told = {"what": "decode", "peer": "bridle", "batch": len(prompts), "context": len(prompts[0]), "top_p": 0.95}
    return told | {"tokens_per_second": len(prompts) / step, "step_ms": 1e3 * step}


def _read(peer: EnginePeer, sizes: Sizes, rates: Rates, prompts: list[list[int]]) -> dict[str, Any]:
    peer.generate(prompts, 1)
    run = peer.generate(prompts, 1)
    num_tokens = sum(map(len, prompts))
    return {
        "what": "prompts",
        "peer": "bridle",
        "batch": len(prompts),
        "context": len(prompts[0]),
        "tokens_per_second": num_tokens / run.seconds,
        "seconds": run.seconds,
        "matmul_share": 2 * sizes.matrix_weights * num_tokens / run.seconds / rates.products,
    }


def _generated(plan: Race, device: torch.device, dtype: torch.dtype, has_time: Callable[[], bool]) -> Figures:
    """Yield figures of transformers' `generate` and `generate_batch` on the shortest context."""
    model = make_model(plan.model, device, dtype, "sdpa")
    context, vocab_size = min(plan.contexts), SHAPES[plan.model]["vocab_size"]
    for batch in plan.batches:
        if has_time():
            yield _decoded_by(GeneratePeer(model), plan, prompts_of(batch, context, vocab_size))
    for batch in plan.batches:
        if has_time():  # last: it needs more of the library, some of which may be lacking
            room = batch * (context + plan.peer_steps + 2 * _PEER_PAGE)
            peer = ContinuousPeer(model, capacity=room, max_batch_tokens=max(batch, _PEER_STEP))
            yield _decoded_by(peer, plan, prompts_of(batch, context, vocab_size))


def _decoded_by(peer: Peer, plan: Race, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the figure of one decode step: the difference between a run of several new tokens and a run of one."""
    peer.generate(prompts, 1)  # the first run of a shape takes longer
    first, full = (peer.generate(prompts, count).seconds for count in (1, plan.peer_steps + 1))
    step = (full - first) / plan.peer_steps if full > first else None  # else lost in noise
    return {
        "what": "decode",
        "peer": "generate_batch" if isinstance(peer, ContinuousPeer) else peer.name,
        "batch": len(prompts),
        "context": len(prompts[0]),
        "tokens_per_second": step and len(prompts) / step,
        "step_ms": step and 1e3 * step,
        "prompts_seconds": first,
    }
