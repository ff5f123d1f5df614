"""Embeddings per second: bridle's packed steps compared with transformers' padded batches, with texts unsorted and
sorted by length.

All three variants run in this process with the same threads, weights and texts, in turns; each figure is the best of
its rounds. The lengths of the texts are distributed like those of questions and paragraphs: many are short and few
long. Processor time is reported as well, because its ratio is reliable on a busy machine. All embeddings are compared
with those of padded batches.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import InternalError

if TYPE_CHECKING:
    from rich.console import Console

Texts = Sequence[Sequence[int]]
Vectors = list[list[float]]

#: Sizes of BERT: layers, hidden size, heads.
SHAPES = {"mini": (6, 384, 12), "base": (12, 768, 12)}
_VOCABULARY = 30_522
_MAX_LENGTH = 512
_TOLERANCE = 1e-3
_LOAD_SECONDS = 3.0  # to make a model and load it twice


@dataclass(slots=True)
class EmbeddingFigure:
    """One peer. Times are in seconds; ratios are relative to padded batches of unsorted texts. `padding` is the share
    of computed tokens that belong to no text."""

    model: str
    peer: str
    num_texts: int
    num_tokens: int
    padding: float
    seconds: float
    cpu_seconds: float
    texts_per_second: float
    ratio: float
    cpu_ratio: float


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run the comparison. Print a table of each model after measuring it."""
    batch = _batch(settings)
    num_texts, num_rounds = _scale(settings)
    texts = make_texts(num_texts)
    figures: list[EmbeddingFigure] = []
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        for name in _names(settings):
            path = _make_checkpoint(name, Path(folder) / name)
            with phases.part(name):
                found = _race(name, path, texts, batch, num_rounds, settings.threads)
            _print_table(console, found)
            figures += found
    return {"batch": batch, "figures": [asdict(figure) for figure in figures]}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each model: three variants embed all texts, padded, sorted and packed."""
    num_texts, num_rounds = _scale(settings)
    texts = make_texts(num_texts)
    shares = (padding(texts, _batch(settings)), padding(sorted(texts, key=len), _batch(settings)), 0.0)
    num_tokens = num_rounds * sum(sum(map(len, texts)) / (1.0 - share) for share in shares)
    return {
        name: limits.python(_LOAD_SECONDS) + limits.seconds(_layers(name), num_tokens, 0) for name in _names(settings)
    }


def _layers(name: str) -> BenchCheckpoint:
    """Return a description of the model with the number of weights that each token is multiplied by."""
    layers, hidden, _ = SHAPES[name]
    return BenchCheckpoint(name, Path(), _VOCABULARY, 12 * layers * hidden**2, 0, 0)


def _names(settings: BenchSettings) -> tuple[str, ...]:
    return ("mini",) if settings.quick else tuple(SHAPES)


def _batch(settings: BenchSettings) -> int:
    return (settings.batches or (32,))[0]


def _scale(settings: BenchSettings) -> tuple[int, int]:
    """Return the numbers of texts and of rounds."""
    return (64, 2) if settings.quick else (512, 3)


def make_texts(num_texts: int, *, seed: int = 0) -> list[list[int]]:
    """Return texts of random tokens, always the same ones for the same arguments. They have 4 tokens or more, and half
    of them below 50."""
    rng = random.Random(seed)
    lengths = [min(max(int(rng.lognormvariate(3.7, 0.9)), 4), _MAX_LENGTH) for _ in range(num_texts)]
    return [[rng.randrange(1_000, _VOCABULARY) for _ in range(length)] for length in lengths]


def _make_checkpoint(name: str, folder: Path) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    layers, hidden, heads = SHAPES[name]
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden
    )
    BertModel(config).save_pretrained(folder)
    return folder


# -- peers ---------------------------------------------------------------------------------------------------


def _race(
    name: str, path: Path, texts: Texts, batch: int, num_rounds: int, threads: int | None
) -> list[EmbeddingFigure]:
    """Return the best time of each variant. The variants take turns, in another order each round."""
    padded = _Padded(path, batch)
    packed = _Packed(path, threads)
    in_order, by_length = f"padded, {batch} at once", f"padded, {batch} at once, sorted"
    peers: dict[str, Callable[[Texts], Vectors]] = {
        in_order: padded.embed,
        by_length: padded.embed_sorted,
        "bridle": packed.embed,
    }
    best: dict[str, tuple[float, float]] = {}
    want: Vectors = []
    try:
        for run in peers.values():
            run(texts[:4])  # build now what would be built lazily
        names = list(peers)
        for number in range(num_rounds):
            shift = number % len(names)
            for peer in (*names[shift:], *names[:shift]):
                began, began_cpu = time.perf_counter(), time.process_time()
                vectors = peers[peer](texts)
                took = time.perf_counter() - began, time.process_time() - began_cpu
                want = want or vectors
                check_same(peer, vectors, want)
                other = best.get(peer, took)
                best[peer] = min(took[0], other[0]), min(took[1], other[1])
    finally:
        packed.close()
    paddings = {in_order: padding(texts, batch), by_length: padding(sorted(texts, key=len), batch), "bridle": 0.0}
    return [_figure(name, peer, texts, paddings[peer], best[peer], best[in_order]) for peer in peers]


def padding(texts: Texts, batch: int) -> float:
    """Return the share of padding tokens in all batches."""
    groups = [texts[at : at + batch] for at in range(0, len(texts), batch)]
    computed = sum(len(group) * max(map(len, group)) for group in groups)
    return 1.0 - sum(map(len, texts)) / computed


def _figure(
    name: str, peer: str, texts: Texts, share: float, took: tuple[float, float], reference: tuple[float, float]
) -> EmbeddingFigure:
    seconds, cpu = took
    return EmbeddingFigure(
        model=name,
        peer=peer,
        num_texts=len(texts),
        num_tokens=sum(map(len, texts)),
        padding=share,
        seconds=seconds,
        cpu_seconds=cpu,
        texts_per_second=len(texts) / seconds,
        ratio=reference[0] / seconds,
        cpu_ratio=reference[1] / max(cpu, 1e-9),
    )


def check_same(peer: str, vectors: Vectors, want: Vectors) -> None:
    """Raise an error for a variant with wrong results, which might look fast."""
    worst = max(abs(a - b) for one, other in zip(vectors, want, strict=True) for a, b in zip(one, other, strict=True))
    if not worst < _TOLERANCE:
        raise InternalError(f"{peer} gave other vectors: they differ by up to {worst:.3g}")


class _Padded:
    """transformers' model over padded batches; an embedding is the mean of the text's hidden states."""

    def __init__(self, path: Path, batch: int) -> None:
        from transformers import BertModel

        self._model: Any = BertModel.from_pretrained(path, add_pooling_layer=False).eval()
        self._batch = batch

    def embed(self, texts: Texts) -> Vectors:
        return [
            vector for at in range(0, len(texts), self._batch) for vector in self._run(texts[at : at + self._batch])
        ]

    def embed_sorted(self, texts: Texts) -> Vectors:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found = self.embed([texts[number] for number in order])
        vectors: Vectors = [[]] * len(texts)
        for number, vector in zip(order, found, strict=True):
            vectors[number] = vector
        return vectors

    def _run(self, texts: Texts) -> Vectors:
        import torch

        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        with torch.inference_mode():
            rows = self._model(input_ids=ids, attention_mask=mask).last_hidden_state  # [N, L, hidden]
            means = (rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            found: Vectors = torch.nn.functional.normalize(means, dim=-1).tolist()
        return found


class _Packed:
    """A bridle engine over the same weights, stepped as fast as possible."""

    def __init__(self, path: Path, threads: int | None) -> None:
        from bridle.config import ModelConfig
        from bridle.engine import Engine
        from bridle.model import load_executor

        self._engine = Engine(load_executor(ModelConfig(str(path), num_threads=threads)))
        self._calls = 0

    def embed(self, texts: Texts) -> Vectors:
        from bridle.engine.request import Request
        from bridle.outputs import Embedded
        from bridle.serving.requests.request_builder import EMBEDDING

        self._calls += 1
        ids = [f"{self._calls}-{number}" for number in range(len(texts))]
        for name, text in zip(ids, texts, strict=True):
            self._engine.add(Request(name, tuple(text), EMBEDDING, embeds=True, detokenize=False))
        found: dict[str, list[float]] = {}
        while self._engine.has_work:
            for event in self._engine.step():
                if isinstance(event, Embedded):
                    found[event.request_id] = event.vector.tolist()
        return [found[name] for name in ids]

    def close(self) -> None:
        self._engine.close()


def _print_table(console: Console, figures: Sequence[EmbeddingFigure]) -> None:
    from rich.table import Table

    first = figures[0]
    table = Table(
        title=f"BERT {first.model}: {first.num_texts} texts of {first.num_tokens / first.num_texts:.0f} tokens",
        caption="x: times padded batches in the order of the texts, by the clock and in CPU time",
    )
    for heading in ("", "padding", "texts/s", "x", "x CPU"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for each in figures:
        table.add_row(
            each.peer,
            f"{each.padding:.0%}",
            f"{each.texts_per_second:.1f}",
            f"{each.ratio:.2f}",
            f"{each.cpu_ratio:.2f}",
        )
    console.print(table)
