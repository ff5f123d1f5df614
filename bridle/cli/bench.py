"""`bridle bench`: measurements one can repeat, each beside a peer or a physical limit."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

Benchmark = Literal["engine", "overhead", "control", "controllers", "constraints", "sampler", "detokenizer"]


def bench(
    name: Annotated[Benchmark, Parameter(name="NAME")],
    /,
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    model_size: Annotated[tuple[Literal["20m", "0.5b"], ...], Parameter(negative="")] = (),
    batch: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    threads: int | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Measure a part of bridle on this machine.

    `engine`: generated tokens per second beside transformers' `generate` and its continuous batching, on
    models made on the spot, with the share of the memory-bandwidth limit. `overhead`: Python time of a step
    outside the model. `control`: what steering costs. `controllers`: what scripts cost. `constraints`: masks
    beside llguidance's own, steps beside free ones. `sampler`: time to choose tokens. `detokenizer`: time to
    spell them.

    Parameters
    ----------
    name
        What to measure.
    quick
        Fewer tokens and rounds: minutes become seconds, ratios become rough.
    model_size
        For `engine`: `20m`, `0.5b` or both (default: both, with --quick the small one).
    batch
        Sequences at once; may be given several times. Default: what suits the benchmark.
    threads
        CPU threads that compute. Default: as many as there are physical cores.
    as_json
        Print one line of JSON with all figures, last.
    """
    from bridle.bench import Settings, run

    run(name, Settings(quick=quick, model_sizes=model_size, batches=batch, threads=threads, as_json=as_json))
    return 0
