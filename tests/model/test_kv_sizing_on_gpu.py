"""Tests of the KV pool's size on a GPU, over a fake of torch's caching allocator. The code that sizes the pool and
measures graphs is real. Memory is allocated as loading and the largest step allocate it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from bridle.config import ModelConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.errors import InternalError, OutOfBlocks
from bridle.model import graph_loading
from bridle.model.graph_kinds import GraphKind
from bridle.model.graph_loading import GraphLoader
from bridle.model.kv_budget import MOST_CONTEXTS, SHARE
from bridle.model.kv_profiling import PoolNeeds, fit_pool
from bridle.testing.scripted import ScriptedExecutor
from tests.model.cuda_memory import MIB, Card, Driven, GraphPool
from tests.model.tape import TapeRecorder

GIB = 1 << 30
CUDA = torch.device("cuda")
BLOCK, STEP_TOKENS, STEP_SEQS = 16, 4096, 256
#: Tokens of the largest step: those of a prompt, and one for each other sequence.
MOST_TOKENS = STEP_TOKENS + STEP_SEQS - 1
CARDS = (24, 80, 141)


class Shape(NamedTuple):
    """Sizes of a model in bfloat16: weights in GB, layers, key-value heads and their width, hidden size, MLP width,
    vocabulary and context."""

    weights: float
    layers: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    vocab: int
    context: int

    @property
    def token_bytes(self) -> int:
        return 4 * self.layers * self.kv_heads * self.dim


SHAPES = {
    "Qwen3-0.6B": Shape(1.2, 28, 8, 128, 1024, 3072, 151_936, 40_960),
    "Llama-3.2-1B": Shape(2.5, 16, 8, 64, 2048, 8192, 128_256, 131_072),
    "Phi-3-mini": Shape(7.6, 32, 32, 96, 3072, 8192, 32_064, 131_072),
    "Mistral-7B": Shape(14.5, 32, 8, 128, 4096, 14_336, 32_768, 32_768),
    "Qwen3-8B": Shape(16.4, 36, 8, 128, 4096, 12_288, 151_936, 40_960),
    "Llama-3.1-8B": Shape(16.1, 32, 8, 128, 4096, 14_336, 128_256, 131_072),
    "Gemma-2-9B": Shape(18.5, 42, 8, 256, 3584, 14_336, 256_000, 8_192),
    "Qwen2.5-14B": Shape(29.5, 48, 8, 128, 5120, 13_824, 152_064, 131_072),
    "Qwen3-32B": Shape(65.5, 64, 8, 128, 5120, 25_600, 151_936, 40_960),
    "Llama-3.1-70B-fp8": Shape(72.7, 80, 8, 128, 8192, 28_672, 128_256, 131_072),
}


@dataclass
class Machine:
    """Allocates a card's memory as a loaded model does."""

    card: Card
    shape: Shape

    def __post_init__(self) -> None:
        self.weights = [self.card.allocate(int(self.shape.weights * 1e9 / 50)) for _ in range(50)]
        self.cached = self.card.allocate(300 * MIB)  # of a trial of layers: freed, but reserved
        del self.cached
        self.pool: list[Any] = []
        self.hidden: Any = None
        self.most_tokens = 0  # that a step has run
        self.runner: Any = SimpleNamespace(attention=SimpleNamespace(cache=SimpleNamespace(device=CUDA)))
        self.graphs = GraphLoader(self.runner, None, None, TapeRecorder)  # type: ignore[arg-type]

    def step(self, num_tokens: int) -> None:
        """Allocate what the largest step allocates: hidden rows, gates, and logits with scores. The head's input stays
        allocated."""
        shape, card = self.shape, self.card
        try:
            rows = [card.allocate(2 * num_tokens * shape.hidden) for _ in range(3)]
            gates = card.allocate(4 * num_tokens * shape.inner)
            del gates
            logits = card.allocate(2 * num_tokens * shape.vocab)
            scores = [card.allocate(GIB // 4) for _ in range(3)]
        except torch.OutOfMemoryError as error:
            raise InternalError("step 1 failed") from error
        self.hidden = None
        self.hidden = card.allocate(2 * num_tokens * shape.hidden)
        self.most_tokens = max(self.most_tokens, num_tokens)
        del rows, logits, scores

    @property
    def step_bytes(self) -> int:
        shape, tokens = self.shape, MOST_TOKENS
        return 2 * tokens * (3 * shape.hidden + shape.vocab) + 3 * GIB // 4

    def allocate(self, num_blocks: int) -> Any:
        part = self.shape.kv_heads * self.shape.dim * 2 * (num_blocks + 1) * BLOCK
        self.pool = [self.card.allocate(part) for _ in range(2 * self.shape.layers)]
        return _Trial(self, num_blocks)

    def fit(self, **config: Any) -> int:
        needs = PoolNeeds(
            ModelConfig(**config),
            CUDA,
            BLOCK,
            BLOCK * self.shape.token_bytes,
            self.shape.context,
            STEP_TOKENS,
            STEP_SEQS,
            weight_bytes=int(self.shape.weights * 1e9),
        )
        return fit_pool(needs, self.allocate, self.graphs.measure) * needs.block_bytes


class _Trial(ScriptedExecutor):
    def __init__(self, machine: Machine, num_blocks: int) -> None:
        room = min(machine.shape.context, num_blocks * BLOCK)
        super().__init__(num_blocks=num_blocks, block_size=BLOCK, max_model_len=room)
        self._machine = machine
        self.info = ExecutorInfo(
            "m", 300, room, num_blocks, BLOCK, device="cuda", max_num_batched_tokens=STEP_TOKENS, max_num_seqs=STEP_SEQS
        )

    def forward(self, plan: Any) -> None:
        self._machine.step(plan.num_tokens)

    def sample(self, batch: Any) -> Any:
        return None

    def reset(self) -> None:
        """Reset nothing, as this executor has no sequences."""

    @contextmanager
    def trying(self, num_blocks: int) -> Iterator[None]:
        """Yield at once, as this executor has no layers and no KV to clear."""
        yield


class Graphs:
    """Fake graphs that take as much memory as a model's: outputs, torch's scratch memory, a shared pool, and driver
    nodes."""

    card: Card
    shape: Shape

    def __init__(self, *_: Any) -> None:
        self._pool = GraphPool()
        self._held: list[Any] = [self.card.allocate(128 * MIB), self.card.allocate(2 * 512 * self.shape.vocab)]

    def capture(self, kind: GraphKind, sizes: list[int], report: Any) -> None:
        for size in sorted(sizes, reverse=True):
            self.card.allocate(2 * size * self.shape.inner, self._pool)  # the next graph uses it again
            self._held.append(Driven(self.card, (6 if kind.has_long else 4) * MIB))


def loaded(shape: Shape, gib: int, monkeypatch: pytest.MonkeyPatch) -> Machine:
    card = Card(gib * GIB)
    card.install(monkeypatch)
    monkeypatch.setattr(graph_loading, "StepGraphs", type("Its", (Graphs,), {"card": card, "shape": shape}))
    monkeypatch.setattr(graph_loading, "find_problem", lambda *_: None)
    return Machine(card, shape)


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("name", "gib"),
    [(name, gib) for name in SHAPES for gib in CARDS if SHAPES[name].weights * 1e9 < (gib - 4) * GIB],
)
def test_the_pool_is_as_large_as_the_card_has_room_for(name: str, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool fills the memory that weights, graphs and the largest step leave, within 2 %, and all of them fit at
    once."""
    shape = SHAPES[name]
    machine = loaded(shape, gib, monkeypatch)
    graphs = loading_alone(shape, monkeypatch)
    machine.card.empty_cache()
    room = machine.card.free - machine.step_bytes - 2 * MOST_TOKENS * shape.hidden - graphs
    want = min(int(SHARE["cuda"] * room), MOST_CONTEXTS * shape.context * shape.token_bytes)
    machine = loaded(shape, gib, monkeypatch)
    have = machine.fit()
    assert abs(have - want) <= 0.02 * want, f"{have / GIB:.1f} GiB where {want / GIB:.1f} fit"
    assert machine.most_tokens == MOST_TOKENS, "the step was measured whole"
    assert machine.graphs.load(_Trial(machine, have // (BLOCK * shape.token_bytes)).info) is not None
    machine.step(MOST_TOKENS)


def loading_alone(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes of all graphs on an otherwise empty card."""
    card = Card(1000 * GIB)
    before = card.free
    made = type("Its", (Graphs,), {"card": card, "shape": shape})()
    for kind in (GraphKind(), GraphKind(has_long=True)):
        made.capture(kind, kind.sizes(STEP_TOKENS), None)
    return before - card.free


def test_a_step_that_fits_beside_no_pool_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = loaded(SHAPES["Gemma-2-9B"]._replace(weights=24.0), 24, monkeypatch)
    with pytest.raises(OutOfBlocks, match="no memory for the largest step, 4096 prompt tokens"):
        machine.fit()
