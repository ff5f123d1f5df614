"""The figures of the overload benchmark: durations, memory, and the share of the available resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridle.bench.load_report import quantile

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of an operation that was measured `num` times in one scene. `beside` names the malicious clients that
    used the server at the same time."""

    scene: str
    beside: str
    what: str
    num: int
    p50: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Resident memory of the server at one time, in MiB."""

    scene: str
    when: str
    mib: float


@dataclass(frozen=True, slots=True)
class Count:
    """Count of one quantity in a scene."""

    scene: str
    what: str
    number: int


@dataclass(slots=True)
class Report:
    """All figures that were recorded so far."""

    latencies: list[Latency] = field(default_factory=list)
    memory: list[ResidentMemory] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)

    def took(self, scene: str, beside: str, what: str, values: Sequence[float]) -> None:
        """Record durations."""
        p50, p99 = quantile(values, 50), quantile(values, 99)
        self.latencies.append(Latency(scene, beside, what, len(values), p50, p99, max(values, default=0.0)))

    def held(self, scene: str, when: str, mib: float) -> None:
        """Record memory."""
        self.memory.append(ResidentMemory(scene, when, mib))

    def counted(self, scene: str, what: str, number: int) -> None:
        """Record a count."""
        self.counts.append(Count(scene, what, number))


def print_report(report: Report, console: Console) -> None:
    """Print tables."""
    from rich.table import Table

    table = Table("scene", "beside", "what", "times", "p50", "p99", "max")
    for each in report.latencies:
        times = (f"{seconds * 1e3:.1f} ms" for seconds in (each.p50, each.p99, each.worst))
        table.add_row(each.scene, each.beside, each.what, str(each.num), *times)
    console.print(table)
    table = Table("scene", "when", "resident")
    for held in report.memory:
        table.add_row(held.scene, held.when, f"{held.mib:.0f} MiB")
    console.print(table)
    table = Table("scene", "what", "number")
    for count in report.counts:
        table.add_row(count.scene, count.what, f"{count.number:,}")
    console.print(table)
