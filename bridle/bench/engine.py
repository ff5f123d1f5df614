"""Measures how many tokens per second bridle's engine generates without a server. The benchmark compares bridle with
transformers, and both with the speed that the memory bandwidth allows.

All generators run in this process with the same threads, weights, prompts and output lengths. The generators take
turns, and each figure is the best of its rounds. Processor time is reported as well, because other work on the machine
affects it less. So the ratio of processor times is reliable even if the ratio of elapsed times is not. Decoding time is
the time of a full run minus the time of a run with one new token, so it contains no prefill. Decoding speed is compared
with the roofline: the speed at which a step's bytes are read at the bandwidth measured in the same run.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench import baselines
from bridle.bench.checkpoints import SHAPES, BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.roofline import read_bandwidth, triad_bandwidth
from bridle.bench.settings import BenchSettings
from bridle.model.memory import return_memory

if TYPE_CHECKING:
    from rich.console import Console

_BATCHES = (1, 16, 64)
_HEADINGS = ("batch", "", "tok/s", "x", "x CPU", "decode/s", "x CPU", "roof", "same")
_PROMPT_TOKENS = (32, 128)  # shortest and longest prompt; both kinds of batching must handle a mix


@dataclass(slots=True)
class EngineFigure:
    """Figures of one generator at one batch size. Times are in seconds, and speeds in generated tokens per second.

    `ratio` is the speed relative to transformers' `generate`, and `cpu_ratio` the ratio of processor times.
    `roof_share` is the decoding speed divided by the speed that the memory bandwidth allows. `agreement` is the share
    of outputs that equal those of transformers' `generate`.
    """

    model: str
    batch: int
    peer: str
    bits: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    first_seconds: float
    cpu_seconds: float
    first_cpu_seconds: float
    tokens_per_second: float = 0.0
    decode_per_second: float = 0.0
    ratio: float = 0.0
    decode_ratio: float = 0.0
    cpu_ratio: float = 0.0
    decode_cpu_ratio: float = 0.0
    roof_share: float = 0.0
    agreement: float = 0.0


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run the whole comparison of generators. A table is printed after each model."""
    bandwidth, triad = read_bandwidth(), triad_bandwidth()
    figures: list[EngineFigure] = []
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        for name in _model_sizes(settings):
            checkpoint = make_checkpoint(name, Path(folder))
            races = _measure_model(checkpoint, settings, phases)
            # measured between all parts; the best value is affected least by other work
            bandwidth, triad = max(bandwidth, read_bandwidth()), max(triad, triad_bandwidth())
            for race in races:
                compare(race, checkpoint, bandwidth)
            _print_table(console, checkpoint, races)
            figures += chain.from_iterable(races)
    console.print(f"memory: {bandwidth / 1e9:.1f} GB/s read, {triad / 1e9:.1f} GB/s triad")
    return {"read_bandwidth": bandwidth, "triad_bandwidth": triad, "figures": [asdict(figure) for figure in figures]}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each comparison. In each round, each generator runs the prompts twice: once to
    generate one token, and once to generate all tokens."""
    num_new, num_rounds = _scale(settings)
    found = {}
    for checkpoint in map(planned_checkpoint, _model_sizes(settings)):
        for batch in _batches(settings):
            num_tokens = 2 * sum(map(len, make_prompts(batch, checkpoint.vocab_size))) + batch * num_new
            run = limits.seconds(checkpoint, num_tokens, num_new + 1)
            found[_part(checkpoint, batch)] = num_rounds * _num_peers() * run
    return found


def _num_peers() -> int:
    """Return the number of generators. The generator with 8-bit integers is only for CPUs."""
    return 4 if baselines.number_bits() == 32 else 3


def _model_sizes(settings: BenchSettings) -> tuple[str, ...]:
    return settings.model_sizes or (("20m",) if settings.quick else tuple(SHAPES))


def _scale(settings: BenchSettings) -> tuple[int, int]:
    """Return the number of new tokens and the number of rounds."""
    return (16, 2) if settings.quick else (64, 3)


def _batches(settings: BenchSettings) -> tuple[int, ...]:
    return settings.batches or ((1, 16) if settings.quick else _BATCHES)


def _part(checkpoint: BenchCheckpoint, batch: int) -> str:
    return f"{checkpoint.name}, {batch} at once"


def _measure_model(checkpoint: BenchCheckpoint, settings: BenchSettings, phases: Phases) -> list[list[EngineFigure]]:
    """Compare the generators at each batch size; return the figures of all comparisons."""
    races = []
    with _peers(checkpoint, settings) as peers:
        for batch in _batches(settings):
            prompts = make_prompts(batch, checkpoint.vocab_size)
            with phases.part(_part(checkpoint, batch)):
                races.append(_race(checkpoint, peers, prompts, *_scale(settings)))
    return races


@contextlib.contextmanager
def _peers(checkpoint: BenchCheckpoint, settings: BenchSettings) -> Iterator[list[baselines.Peer]]:
    model = baselines.load_transformers(checkpoint)
    makers: list[Callable[[], baselines.Peer]] = [
        lambda: baselines.GeneratePeer(model),
        lambda: baselines.ContinuousPeer(model),
        lambda: baselines.BridlePeer(checkpoint, num_threads=settings.threads),
        lambda: baselines.BridlePeer(checkpoint, num_threads=settings.threads, quantization="int8"),
    ]
    peers: list[baselines.Peer] = []
    try:
        for make in makers[: _num_peers()]:
            peers.append(make())
        yield peers
    finally:
        for peer in peers:
            peer.close()


def make_prompts(num_prompts: int, vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens and random lengths. The same arguments give the same prompts."""
    rng = random.Random(seed)
    lengths = [rng.randint(*_PROMPT_TOKENS) for _ in range(num_prompts)]
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def _race(
    checkpoint: BenchCheckpoint,
    peers: Sequence[baselines.Peer],
    prompts: baselines.Prompts,
    num_new: int,
    num_rounds: int,
) -> list[EngineFigure]:
    """Return the best time of each generator. The generators take turns, in a different order in each round."""
    best: dict[tuple[str, int], baselines.BaselineRun] = {}
    for peer in peers:
        peer.generate(prompts[:2], 2)  # build now what would be built lazily
    for number in range(num_rounds):
        shift = number % len(peers)
        for peer in (*peers[shift:], *peers[:shift]):
            for length in (1, num_new):
                return_memory()  # or a peer that sizes its cache by what is free finds no room after another's batch
                run = peer.generate(prompts, length)
                check_lengths(peer, run.outputs, length)
                best[peer.name, length] = better(run, best.get((peer.name, length)))
    reference = best[peers[0].name, num_new].outputs
    return [
        _figure(checkpoint, peer, prompts, best[peer.name, 1], best[peer.name, num_new], reference) for peer in peers
    ]


def better(run: baselines.BaselineRun, other: baselines.BaselineRun | None) -> baselines.BaselineRun:
    """Return the lowest elapsed time and the lowest processor time, which may come from different rounds."""
    if other is None:
        return run
    return baselines.BaselineRun(run.outputs, min(run.seconds, other.seconds), min(run.cpu_seconds, other.cpu_seconds))


def _figure(
    checkpoint: BenchCheckpoint,
    peer: baselines.Peer,
    prompts: baselines.Prompts,
    first: baselines.BaselineRun,
    full: baselines.BaselineRun,
    reference: list[list[int]],
) -> EngineFigure:
    return EngineFigure(
        model=checkpoint.name,
        batch=len(prompts),
        peer=peer.name,
        bits=peer.bits,
        prompt_tokens=sum(map(len, prompts)),
        new_tokens=sum(map(len, full.outputs)),
        seconds=full.seconds,
        first_seconds=first.seconds,
        cpu_seconds=full.cpu_seconds,
        first_cpu_seconds=first.cpu_seconds,
        agreement=agreement_of(full.outputs, reference),
    )


def check_lengths(peer: baselines.Peer, tokens: Sequence[Sequence[int]], num_new: int) -> None:
    """Raise an error if a generator ended early, because it would look fast."""
    short = [len(output) for output in tokens if len(output) != num_new]
    if short:
        raise RuntimeError(f"{peer.name} generated {short[0]} tokens; {num_new} were requested")


def agreement_of(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    same = sum(list(ours) == list(theirs) for ours, theirs in zip(outputs, reference, strict=True))
    return same / len(reference)


def compare(figures: Sequence[EngineFigure], checkpoint: BenchCheckpoint, bandwidth: float) -> None:
    """Fill in the speeds and their ratios in the table's rows. The ratios compare each row with the first row."""
    for figure in figures:
        figure.tokens_per_second = figure.new_tokens / figure.seconds
        later = figure.new_tokens - figure.batch  # the first token of each sequence belongs to the prefill
        figure.decode_per_second = later / max(figure.seconds - figure.first_seconds, 1e-9)
        figure.roof_share = figure.decode_per_second / roof(figure, checkpoint, bandwidth)
    reference = figures[0]
    for figure in figures:
        figure.ratio = reference.seconds / figure.seconds
        figure.cpu_ratio = reference.cpu_seconds / figure.cpu_seconds
        figure.decode_ratio = figure.decode_per_second / reference.decode_per_second
        figure.decode_cpu_ratio = _decode_cpu(reference) / _decode_cpu(figure)


def _decode_cpu(figure: EngineFigure) -> float:
    return max(figure.cpu_seconds - figure.first_cpu_seconds, 1e-9)


def roof(figure: EngineFigure, checkpoint: BenchCheckpoint, bandwidth: float) -> float:
    """Return the highest tokens per second that the memory bandwidth allows: a step only reads the weights and the KV
    of its sequences."""
    context = figure.prompt_tokens + figure.new_tokens / 2  # of all sequences, halfway through the run
    weights = checkpoint.step_bytes * figure.bits / 32
    cache = checkpoint.token_bytes * context * baselines.number_bits() / 32
    return figure.batch * bandwidth / (weights + cache)


def _print_table(console: Console, checkpoint: BenchCheckpoint, races: Sequence[Sequence[EngineFigure]]) -> None:
    from rich.table import Table

    title = f"{checkpoint.name}: {checkpoint.num_parameters / 1e6:.0f} million parameters"
    table = Table(
        title=title,
        caption="x: times transformers' generate, by the clock and in CPU time; decode: without the prefill",
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for race in races:
        for figure in race:
            table.add_row(*_cells(figure))
        table.add_section()
    console.print(table)


def _cells(figure: EngineFigure) -> tuple[str, ...]:
    return (
        str(figure.batch),
        figure.peer,
        f"{figure.tokens_per_second:.1f}",
        f"{figure.ratio:.2f}",
        f"{figure.cpu_ratio:.2f}",
        f"{figure.decode_per_second:.1f}",
        f"{figure.decode_cpu_ratio:.2f}",
        f"{figure.roof_share:.0%}",
        f"{figure.agreement:.0%}",
    )
