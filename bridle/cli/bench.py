"""`bridle bench`: measurements that users can repeat, each beside a peer or a physical limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from bridle.bench import BenchSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How much to measure, and where the figures go."""

    quick: Annotated[bool, Parameter(negative="")] = False
    "Fewer tokens and rounds: minutes become seconds, ratios become rough."
    model_size: Annotated[tuple[Literal["20m", "0.5b", "1.5b"], ...], Parameter(negative="")] = ()
    (
        "For `engine`, `cpu`, `lmtp` and `steps`: `20m`, `0.5b`, `1.5b` or several (default: the first two, for `lmtp` "
        "the second, for `cpu` the last two, for `steps` and with --quick the small one)."
    )
    batch: Annotated[tuple[int, ...], Parameter(negative="")] = ()
    "Sequences or streams at once; may be given several times. Default: what suits the benchmark."
    threads: int | None = None
    "CPU threads that compute. Default: as many as there are physical cores."
    lmql: Path | None = None
    (
        "For `lmtp`: folder of a virtual environment with the genuine LMQL, made there if it is missing (minutes, a "
        "gigabyte). Default: in the user's cache folder."
    )
    report: Path | None = None
    (
        "For `simulation`: a page (Markdown) whose tables are made anew, with plots and figures in a folder beside it; "
        "for `cpu`: a picture (SVG or PNG). "
        "Needs `pip install 'bridle-llm[bench]'`."
    )
    parts: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    (
        "For `cpu` and `gpu`: only the parts whose names contain this text; may be given several times. Names of `gpu` "
        "are `probe`, `0.6b`, `8b`, `control`, `lora`; those of `cpu` are like `0.5b decode 8-bit 16x128` (sequences x "
        "context), `0.5b prefill float32 1x256`, `0.5b http`, `0.5b control`, `0.5b lmtp`."
    )
    folder: Path | None = None
    (
        "For `cpu`: a folder in which models, files and the figures of each part are kept; a part whose figures are "
        "there is not measured again, so a run that was broken off goes on. For `gpu`: each figure is added to a file "
        "there. Default: nothing is kept."
    )
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    "Print one line of JSON with all figures, last."

    def to_settings(self) -> BenchSettings:
        from bridle.bench import BenchSettings

        return BenchSettings(
            self.quick,
            self.model_size,
            self.batch,
            self.threads,
            self.as_json,
            self.lmql,
            self.report,
            self.parts,
            self.folder,
        )


_OPTIONS = BenchOptions()


def bench(
    name: Annotated[str | None, Parameter(name="NAME")] = None,
    /,
    *,
    options: BenchOptions = _OPTIONS,
) -> int:
    """Measure a part of bridle on this machine. Without a NAME: list what can be measured.

    `engine`: generated tokens per second beside transformers' `generate` and its continuous batching, on models made
    on the spot, with the share of the memory-bandwidth limit. `gpu`: decoding, prompts, control and adapters on a GPU.
    `control`: what steering costs. `serve`: the HTTP server under load, beside the offline engine. `overhead`: Python
    time of a step outside the model. From a checkout of bridle there are more, some beside peers that have to be
    installed.

    Parameters
    ----------
    name
        What to measure.
    """
    from bridle.bench import benchmarks, run

    if name is None:
        print("\n".join(f"{known:12} {words}" for known, words in sorted(benchmarks().items())))
    else:
        run(name, options.to_settings())
    return 0
