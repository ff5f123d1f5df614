"""The result of a load on a server, in one row: rates, latencies, and the share that each user got."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from bridle.bench.serve_process import HttpServer
from bridle.bench.sse_client import Sample

if TYPE_CHECKING:
    from rich.console import Console

#: A request is good if its first token arrives within `FIRST_LIMIT` seconds, and later ones on average within
#: `PACE_LIMIT` seconds each.
FIRST_LIMIT, PACE_LIMIT = 2.0, 0.25


@dataclass(frozen=True, slots=True)
class Row:
    """One load. Latencies are in seconds. A gap is the time between two tokens of a stream. `goodput` is the number of
    requests per second that met the latency limits. Processor time is the mean number of busy cores."""

    load: str
    requests: int
    refused: int
    failed: int
    tokens_per_second: float
    requests_per_second: float
    goodput: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    client_cpu: float
    server_cpu: float


async def timed(load: str, server: HttpServer, running: Awaitable[list[Sample]]) -> tuple[Row, list[Sample]]:
    """Send a load until all of its requests have ended; return its figures and its samples."""
    cpu, server_cpu, begin = time.process_time(), server.cpu_seconds, time.perf_counter()
    samples = await running
    seconds = time.perf_counter() - begin
    cpu, server_cpu = time.process_time() - cpu, server.cpu_seconds - server_cpu
    return row_of(load, samples, seconds, cpu / seconds, server_cpu / seconds), samples


def row_of(load: str, samples: Sequence[Sample], seconds: float, client_cpu: float, server_cpu: float) -> Row:
    """Return the figures of samples that were measured in a period of `seconds`."""
    done = [each for each in samples if each.is_complete]
    refused = sum(each.status == 429 for each in samples)
    firsts = [each.first for each in done]
    gaps = [gap for each in done for gap in each.gaps]
    good = sum(each.first <= FIRST_LIMIT and each.pace <= PACE_LIMIT for each in done)
    return Row(
        load=load,
        requests=len(samples),
        refused=refused,
        failed=len(samples) - refused - len(done),
        tokens_per_second=sum(each.num_tokens for each in done) / seconds,
        requests_per_second=len(done) / seconds,
        goodput=good / seconds,
        first_p50=quantile(firsts, 50),
        first_p99=quantile(firsts, 99),
        gap_p50=quantile(gaps, 50),
        gap_p99=quantile(gaps, 99),
        client_cpu=client_cpu,
        server_cpu=server_cpu,
    )


def best(rows: Sequence[Row]) -> Row:
    """Return the row with the most tokens per second. Other programs disturbed the measurement of this row least."""
    return max(rows, key=lambda row: row.tokens_per_second)


def quantile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of `values`; 0 if there are no values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return median(values) if percent == 50 else quantiles(values, n=100, method="inclusive")[percent - 1]


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print the rows as a table."""
    from rich.table import Table

    table = Table(
        "load", "requests", "refused", "tok/s", "req/s", "goodput", "first p50/p99", "gap p50/p99", "CPU client/server",
        caption=f"goodput: req/s with the first token within {FIRST_LIMIT:g} s and {PACE_LIMIT:g} s per further one",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.load,
            f"{row.requests}" + (f" ({row.failed} failed)" if row.failed else ""),
            str(row.refused),
            f"{row.tokens_per_second:.1f}",
            f"{row.requests_per_second:.2f}",
            f"{row.goodput:.2f}",
            f"{row.first_p50 * 1000:.0f} / {row.first_p99 * 1000:.0f} ms",
            f"{row.gap_p50 * 1000:.1f} / {row.gap_p99 * 1000:.1f} ms",
            f"{row.client_cpu:.2f} / {row.server_cpu:.2f}",
        )
    console.print(table)
