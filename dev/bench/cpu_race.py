"""Runs the programs of `bridle bench cpu` in one case, in turns, and measures the machine's limits in the same minute.

Decoding is measured in short slices. All programs read their prompts first; then each program runs a few steps at a
time, in turn. So other work on the machine affects all programs alike. The fastest step counts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from bridle.bench.baselines import BaselineRun, BridlePeer, GeneratePeer
from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.engine import better
from bridle.bench.settings import BenchSettings
from dev.bench.cpu_files import weight_bytes
from dev.bench.cpu_limits import CpuCase, CpuLimits
from dev.bench.cpu_parts import BenchPart, num_rounds, num_steps

_SLICE = 4  # steps


@dataclass(slots=True)
class CpuFigure:
    """Figures of one program in one case. `ratio` and `cpu_ratio` are relative to the first available program of the
    group, in clock time and processor time. `limit_share` is the time that the tightest machine limit allows, divided
    by the clock time.
    """

    model: str
    group: str
    case: CpuCase
    peer: str
    tokens_per_second: float
    median_tokens_per_second: float
    cpu_seconds_per_token: float
    limit_share: float
    ratio: float | None = None
    cpu_ratio: float | None = None


def race(
    checkpoint: BenchCheckpoint, peers: dict[str, Any], part: BenchPart, folder: Path, settings: BenchSettings
) -> tuple[list[CpuFigure], CpuLimits]:
    """Return the figures of a part. `peers` has the available programs by name, and `folder` their files."""
    assert part.case is not None
    limits = CpuLimits()
    limits.look()
    prompts = make_prompts_of(part.case.batch, part.case.context, checkpoint.vocab_size)
    if part.case.kind == "prefill":
        times = _read_prompts(peers, prompts, num_rounds(part.case, settings), limits)
    else:
        times = _decode(peers, prompts, num_steps(settings), limits)
    limits.look()
    figures = [_figure(checkpoint, part, name, found, folder, limits) for name, found in times.items()]
    first = next((figure for figure in figures if figure.peer == part.peers[0]), None)
    for figure in figures if first is not None else ():
        figure.ratio = figure.tokens_per_second / first.tokens_per_second  # type: ignore[union-attr]
        figure.cpu_ratio = first.cpu_seconds_per_token / figure.cpu_seconds_per_token  # type: ignore[union-attr]
    return figures, limits


@dataclass(slots=True)
class Times:
    """Seconds of steps or of prompts, and the lowest processor time of one of them."""

    seconds: list[float]
    cpu_seconds: float

    def add(self, run: BaselineRun) -> None:
        self.seconds.append(run.seconds)
        self.cpu_seconds = min(self.cpu_seconds, run.cpu_seconds)


def _read_prompts(peers: dict[str, Any], prompts: list[list[int]], rounds: int, limits: CpuLimits) -> dict[str, Times]:
    times = {name: Times([], inf) for name in peers}
    for number in range(rounds):
        for name in _turn(peers, number):
            times[name].add(peers[name].generate(prompts, 1))
        limits.look()
    return times


def _decode(peers: dict[str, Any], prompts: list[list[int]], count: int, limits: CpuLimits) -> dict[str, Times]:
    times = {name: Times([], inf) for name in peers}
    engines = {name: peer for name, peer in peers.items() if isinstance(peer, BridlePeer)}
    for peer in engines.values():
        peer.start(prompts, 1 + count)
    for number in range(count // _SLICE):
        for name in _turn(engines, number):
            for run in engines[name].advance(_SLICE):
                times[name].add(run)
        if number % 4 == 0:
            limits.look()
    for peer in engines.values():
        peer.finish()
    for name, peer in peers.items():
        if isinstance(peer, GeneratePeer):  # it does not tell of its steps: two runs that differ by some
            times[name].add(_between(peer, prompts, min(count, 16)))
    return times


def _between(peer: GeneratePeer, prompts: list[list[int]], count: int) -> BaselineRun:
    first = full = None
    for _ in range(2):
        first, full = better(peer.generate(prompts, 1), first), better(peer.generate(prompts, 1 + count), full)
    assert first is not None and full is not None
    seconds, cpu = full.seconds - first.seconds, full.cpu_seconds - first.cpu_seconds
    return BaselineRun([], max(seconds, 1e-9) / count, max(cpu, 1e-9) / count)


def _turn(peers: dict[str, Any], number: int) -> list[str]:
    """Return the names of the programs, starting with another name in each round."""
    names = list(peers)
    shift = number % len(names) if names else 0
    return names[shift:] + names[:shift]


def _figure(
    checkpoint: BenchCheckpoint, part: BenchPart, peer: str, times: Times, folder: Path, limits: CpuLimits
) -> CpuFigure:
    assert part.case is not None
    case, form = part.case, peer.rpartition(" ")[2]
    tokens = case.batch if case.kind == "decode" else case.batch * case.context
    least = limits.seconds(checkpoint, form, case, tokens, weight_bytes(checkpoint, folder, form))
    return CpuFigure(
        checkpoint.name,
        part.group,
        case,
        peer,
        tokens / min(times.seconds),
        tokens / median(times.seconds),
        max(times.cpu_seconds, 1e-9) / tokens,
        least / min(times.seconds),
    )


def make_prompts_of(num_prompts: int, length: int, vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Return random tokens, always the same ones for the same arguments."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(num_prompts)]


def as_rows(figures: Sequence[CpuFigure]) -> list[dict[str, Any]]:
    """Return the figures as rows for JSON, each with the fields of its case."""
    rows = []
    for figure in figures:
        row = asdict(figure)
        rows.append(row | row.pop("case"))
    return rows
