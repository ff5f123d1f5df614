"""`bridle bench`: benchmarks for users, each compared with another program or a physical limit."""

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
    """Options for the size of a benchmark and the destination of its results."""

    quick: Annotated[bool, Parameter(negative="")] = False
    "Measure for seconds instead of minutes, with fewer tokens and rounds. Ratios are then rough."
    model_size: Annotated[tuple[Literal["20m", "0.5b", "1.5b"], ...], Parameter(negative="")] = ()
    """Model size for `engine`, `cpu`, `lmtp` and `steps`. Repeatable. Default: 20m for `steps` and with --quick, 0.5b
    for `lmtp`, 0.5b and 1.5b for `cpu`, 20m and 0.5b for `engine`."""
    batch: Annotated[tuple[int, ...], Parameter(negative="")] = ()
    "Number of concurrent sequences or streams. Repeatable. Default: depends on the benchmark."
    threads: int | None = None
    "Number of CPU threads. Default: the number of physical cores."
    lmql: Path | None = None
    """For `lmtp`: folder of a virtual environment with LMQL. A missing one is created, which takes minutes and 1 GB.
    Default: in the user's cache folder."""
    report: Path | None = None
    """File to write: for `simulation` a Markdown page to update, with plots next to it; for `cpu` an SVG or PNG plot.
    Needs `pip install 'bridle-llm[bench]'`."""
    parts: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Measure only the parts of `cpu` or `gpu` whose names contain this text. Parts of `gpu`: `probe`, `0.6b`, `8b`,
    `control`, `lora`. Parts of `cpu`: such as `0.5b decode 8-bit 16x128` (sequences x context),
    `0.5b prefill float32 1x256`, `0.5b http`, `0.5b control`, `0.5b lmtp`. Repeatable."""
    folder: Path | None = None
    """Folder to keep results in. For `cpu`, it also keeps models, and the next run skips parts with results in it. For
    `gpu`, results are appended to a file. Default: keep nothing."""
    load_model: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """For `load` and `real`: GGUF file or folder to start a server with. For `hybrid`: folder, or name of a model
    shape. Repeatable."""
    llama_server: Path | None = None
    "For `load` and `real`: path of llama.cpp's `llama-server`, to measure it too."
    llama_bench: Path | None = None
    "For `real` and `hybrid`: path of llama.cpp's `llama-bench`. Default: next to `llama-server`."
    cases: int | None = None
    "For `recipes`: number of cases of each recipe. Default: 100; 4 with --quick."
    minutes: float | None = None
    "For `soak`: minutes of traffic. Default: 10; half a minute with --quick."
    front_ends: int = 1
    "For `frontend`: number of processes that write streams to clients, like `--front-ends` of `bridle serve`."
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    "Print all results as one line of JSON at the end."

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
            self.load_model,
            self.llama_server,
            self.llama_bench or (self.llama_server and self.llama_server.with_name("llama-bench")),
            self.cases,
            self.minutes,
            self.front_ends,
        )


def bench(
    name: Annotated[str | None, Parameter(name="NAME")] = None, /, *, options: BenchOptions = BenchOptions()
) -> int:
    """Measure a part of bridle on this machine.

    Without a NAME, the benchmarks are listed. `engine`: generated tokens per second next to transformers' `generate`
    and its continuous batching, with the share of the memory-bandwidth limit. `gpu`: decoding, prompts, control and
    adapters on a GPU. `control`: the cost of steering. `load`: the time that a server takes to start. `real`: real
    models next to llama.cpp's programs. `serve`: the HTTP server under load, next to the offline engine. `overhead`:
    Python time of a step outside the model. A source checkout of bridle has more benchmarks.

    Parameters
    ----------
    name
        Benchmark to run. Default: list them.
    """
    from bridle.bench import benchmarks, run

    if name is None:
        print("\n".join(f"{known:12} {words}" for known, words in sorted(benchmarks().items())))
    else:
        run(name, options.to_settings())
    return 0
