"""What a CPU gives: decoding and prompts in every form of weights, through the whole engine.

Models have real shapes and random weights, made on the spot. Beside bridle's forms stand llama.cpp, behind the same
engine over the very same files, where `llama-cpp-python` is installed, and transformers' `generate`. All take turns;
each figure is the best of its rounds, of decoding the best step. Beside each stands how much of the limit it reaches:
the time that memory takes to deliver the weights and the context, or that the arithmetic units take for the products,
whichever is longer, both measured between the rounds. Processor time stands beside the clock's, which other work
disturbs more.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import Checkpoint, make_checkpoint
from bridle.bench.engine import better
from bridle.bench.peers import BridlePeer, GeneratePeer, Peer, Run, load_transformers
from bridle.bench.roof import read_bandwidth
from bridle.bench.settings import Settings
from lab.bench.cpu_files import can_write, has_llamacpp, write_files

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = ("", "tok/s", "x", "x CPU", "CPU ms/tok", "limit")
#: The most prompt tokens of a case that transformers is put through.
_MAX_TRANSFORMERS = 2048
_BYTES = {"float32": 4.0, "int8": 1.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_K_M": 0.6}


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences with prompts of `context` tokens; their decoding, or the prompts themselves."""

    kind: str
    batch: int
    context: int


@dataclass(slots=True)
class Figure:
    """One peer in one case. `ratio` and `cpu_ratio` are against the first peer, in clock and processor time;
    `limit_share` is the time of the nearest limit over the clock's."""

    model: str
    case: Case
    peer: str
    tokens_per_second: float
    cpu_seconds_per_token: float
    ratio: float = 0.0
    cpu_ratio: float = 0.0
    limit_share: float = 0.0


def measure(settings: Settings, console: Console) -> dict[str, Any]:
    """Run the whole comparison. Prints a table per model and case as it goes."""
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    figures: list[Figure] = []
    limits = Limits()
    names = settings.model_sizes or (("20m",) if settings.quick else ("0.5b", "1.5b"))
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        for name in names:
            checkpoint = make_checkpoint(name, Path(folder))
            figures += _measure_model(checkpoint, Path(folder), settings, limits, console)
    console.print(f"limits: {limits.bandwidth / 1e9:.1f} GB/s read, {limits.operations / 1e9:.0f} 8-bit GOP/s")
    if settings.report is not None:
        _plot(figures, settings.report)
    return {
        "read_bandwidth": limits.bandwidth,
        "int8_operations": limits.operations,
        "figures": [asdict(figure) for figure in figures],
    }


def cases(settings: Settings) -> list[Case]:
    """What is measured, the smallest first."""
    batches = settings.batches or ((1, 16) if settings.quick else (1, 4, 16, 64))
    contexts = (128,) if settings.quick else (128, 1024)
    prompts = (256,) if settings.quick else (256, 2048)
    decoding = [Case("decode", batch, context) for context in contexts for batch in batches]
    return decoding + [Case("prefill", 1, length) for length in prompts]


def _prompts(num_prompts: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random tokens, the same for the same arguments."""
    rng = random.Random(0)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(num_prompts)]


class Limits:
    """The most that memory and arithmetic units gave so far."""

    def __init__(self) -> None:
        self.bandwidth = self.operations = 0.0

    def look(self) -> None:
        """Measure again; the least disturbed measurement counts."""
        self.bandwidth = max(self.bandwidth, read_bandwidth(num_rounds=2))
        self.operations = max(self.operations, int8_operations())

    def seconds(self, checkpoint: Checkpoint, form: str, case: Case, steps_tokens: int) -> float:
        """The least time of one step that reads all weights once and computes so many tokens."""
        weights = checkpoint.step_bytes / 4
        context = checkpoint.token_bytes * case.batch * case.context
        read = (weights * _BYTES[form] + (context if case.kind == "decode" else 0)) / self.bandwidth
        body = weights if case.kind == "decode" else weights - checkpoint.head_numbers
        rate = self.operations if form != "float32" else self.operations / 4
        return max(read, 2 * body * steps_tokens / rate)


def int8_operations(rows: int = 192, side: int = 1024, num_rounds: int = 8) -> float:
    """Multiplications and additions per second of the 8-bit product, out of the caches."""
    import torch

    from bridle.model.quantize import Int8Linear

    layer = Int8Linear(torch.nn.Linear(side, side, bias=False).requires_grad_(False))
    inputs = torch.ones(rows, side)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(num_rounds):
            begin = time.perf_counter()
            layer(inputs)
            best = min(best, time.perf_counter() - begin)
    return 2 * rows * side * side / best


def _measure_model(
    checkpoint: Checkpoint, folder: Path, settings: Settings, limits: Limits, console: Console
) -> list[Figure]:
    wanted = cases(settings)
    capacity = max(case.batch * (case.context + 64) for case in wanted)
    figures = []
    with ExitStack() as stack:
        peers = []
        for make in _makers(checkpoint, folder, settings, capacity):
            peers.append(make())
            stack.callback(peers[-1].close)
        for case in wanted:
            with console.status(f"{checkpoint.name}: {case.kind}, {case.batch} x {case.context}"):
                found = _race(checkpoint, peers, case, settings, limits)
            _print(console, checkpoint, case, found)
            figures += found
    return figures


def _makers(checkpoint: Checkpoint, folder: Path, settings: Settings, capacity: int) -> list[Callable[[], Peer]]:
    def named(peer: BridlePeer, name: str) -> Peer:
        peer.name = name
        return peer

    shared: dict[str, Any] = {"num_threads": settings.threads, "capacity": capacity, "max_num_seqs": 64}
    makers: list[Callable[[], Peer]] = [
        lambda: named(BridlePeer(checkpoint, **shared), "bridle float32"),
        lambda: named(BridlePeer(checkpoint, quantization="int8", **shared), "bridle int8"),
    ]
    files = write_files(checkpoint, folder) if can_write() else {}
    for form, file in files.items():
        makers.append(lambda form=form, file=file: named(BridlePeer(checkpoint, file=file, **shared), f"bridle {form}"))  # type: ignore[misc]
        if has_llamacpp():
            makers.append(
                lambda form=form, file=file: named(  # type: ignore[misc]
                    BridlePeer(checkpoint, file=file, backend="llamacpp", **shared), f"llama.cpp {form}"
                )
            )
    if not settings.quick:
        makers.append(lambda: GeneratePeer(load_transformers(checkpoint)))
    return makers


def _race(
    checkpoint: Checkpoint, peers: Sequence[Peer], case: Case, settings: Settings, limits: Limits
) -> list[Figure]:
    num_new, num_rounds = (8, 2) if settings.quick else (24, 3)
    length = 1 + num_new if case.kind == "decode" else 1
    prompts = _prompts(case.batch, case.context, checkpoint.vocab_size)
    running = [p for p in peers if not isinstance(p, GeneratePeer) or case.batch * case.context <= _MAX_TRANSFORMERS]
    best: dict[str, Run] = {}
    for number in range(num_rounds):
        limits.look()
        shift = number % len(running)
        for peer in (*running[shift:], *running[:shift]):
            best[peer.name] = better(peer.generate(prompts, length), best.get(peer.name))
            if case.kind == "decode" and isinstance(peer, GeneratePeer):  # it does not tell of its steps
                run, first = best[peer.name], peer.generate(prompts, 1)
                run.step_seconds = (run.seconds - first.seconds) / num_new
                run.step_cpu_seconds = (run.cpu_seconds - first.cpu_seconds) / num_new
    figures = [_figure(checkpoint, case, peer.name, best[peer.name]) for peer in running]
    for figure in figures:
        figure.ratio = figure.tokens_per_second / figures[0].tokens_per_second
        figure.cpu_ratio = figures[0].cpu_seconds_per_token / figure.cpu_seconds_per_token
        form = figure.peer.rpartition(" ")[2]
        step = case.batch if case.kind == "decode" else case.context
        least = limits.seconds(checkpoint, form if form in _BYTES else "float32", case, step)
        figure.limit_share = least * figure.tokens_per_second / step
    return figures


def _figure(checkpoint: Checkpoint, case: Case, peer: str, run: Run) -> Figure:
    is_prefill = case.kind == "prefill"
    tokens = case.batch * case.context if is_prefill else case.batch
    seconds, cpu = (run.seconds, run.cpu_seconds) if is_prefill else (run.step_seconds, run.step_cpu_seconds)
    return Figure(checkpoint.name, case, peer, tokens / max(seconds, 1e-9), max(cpu, 1e-9) / tokens)


def _print(console: Console, checkpoint: Checkpoint, case: Case, figures: Sequence[Figure]) -> None:
    from rich.table import Table

    shown = f"{case.batch} of {case.context} tokens" if case.kind == "decode" else f"a prompt of {case.context}"
    table = Table(
        title=f"{checkpoint.name}, {case.kind}: {shown}",
        caption="x: times the first, by the clock and in CPU time; limit: share of what memory or arithmetic allow",
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for f in figures:
        cells = (f"{f.tokens_per_second:.1f}", f"{f.ratio:.2f}", f"{f.cpu_ratio:.2f}")
        table.add_row(f.peer, *cells, f"{f.cpu_seconds_per_token * 1e3:.2f}", f"{f.limit_share:.0%}")
    console.print(table)


def _plot(figures: Sequence[Figure], path: Path) -> None:
    """Decoding speed by batch, a panel for each model and context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    decoding = [figure for figure in figures if figure.case.kind == "decode"]
    panels = sorted({(figure.model, figure.case.context) for figure in decoding})
    drawing, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for (model, context), axis in zip(panels, axes[0], strict=True):
        within = [figure for figure in decoding if (figure.model, figure.case.context) == (model, context)]
        for peer in dict.fromkeys(figure.peer for figure in within):
            points = [(f.case.batch, f.tokens_per_second) for f in within if f.peer == peer]
            style = {"bridle": "-", "llama.cpp": "--"}.get(peer.split(" ")[0], ":")
            axis.plot(*zip(*points, strict=True), style, marker="o", label=peer)
        axis.set(xscale="log", yscale="log", xlabel="sequences", ylabel="tokens/s", title=f"{model}, context {context}")
        axis.legend(fontsize=7)
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)
