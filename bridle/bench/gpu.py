"""Benchmark of a GPU and of bridle on it: `bridle bench gpu`, in ten minutes at most, without files or a network.

Models are random numbers in well-known shapes, made on the device; only the server's lies in files, for a while. Each
figure is printed as a line of JSON immediately, so that an interrupted run loses only the figure in progress. A part
that fails, or that has used up its time, leaves the others as they are. On a CPU the same code runs in a tiny form
(`--quick`), whose figures say nothing.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from bridle.bench.gpu_probe import Rates

#: Parts, and the most seconds after which each begins nothing more.
PARTS = {"probe": 30.0, "0.6b": 150.0, "8b": 150.0, "attention": 30.0, "control": 80.0, "lora": 80.0, "serve": 80.0}
FILE_NAME = "gpu.jsonl"
#: Of the free memory, for keys and values; weights, a peer's and its cache have to have room beside them.
_CACHE_SHARE = 0.6

Figures = Iterator[dict[str, Any]]


@dataclass(slots=True)
class Bench:
    """Device, settings and output of a benchmark run."""

    device: torch.device
    dtype: torch.dtype
    settings: BenchSettings
    console: Console
    rates: Rates | None = None

    def tell(self, part: str, figure: dict[str, Any]) -> None:
        """A line, at once: on standard output, and in the folder."""
        line = json.dumps({"part": part, **figure})
        if self.settings.as_json:
            print(line, flush=True)
        else:
            self.console.print(f"{part}: {_shown(figure)}")
        if self.settings.folder is not None:
            self.settings.folder.mkdir(parents=True, exist_ok=True)
            with Path(self.settings.folder, FILE_NAME).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Parts whose names contain one of `settings.parts`, and about how long each takes: no longer than it may. A sixth
    of it is Python's: loading, and tracing kernels."""
    chosen = {name: most for name, most in PARTS.items() if _is_wanted(name, settings)}
    if not chosen:
        raise InvalidRequest(f"no part is called {settings.parts[0]!r}; there are {', '.join(PARTS)}", "parts")
    usual = {name: 2.0 if settings.quick else 0.6 * most for name, most in chosen.items()}
    return {name: min(5 * each / 6 + limits.python(each / 6), chosen[name]) for name, each in usual.items()}


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Go through the parts. What others are set against is always probed."""
    import torch

    from bridle.bench.roofline import bench_device

    device = bench_device()
    if device.type == "cpu" and not settings.quick:
        raise InvalidRequest("there is no GPU here; --quick runs a toy on the CPU, to try the benchmark itself", "NAME")
    bench = Bench(device, torch.float32 if device.type == "cpu" else torch.bfloat16, settings, console)
    figures: list[dict[str, Any]] = []
    for name in PARTS:
        if _is_wanted(name, settings):
            with phases.part(name):
                figures += _run_part(bench, name)
    return {"figures": figures}


def _is_wanted(name: str, settings: BenchSettings) -> bool:
    return not settings.parts or any(piece in name for piece in settings.parts)


def _run_part(bench: Bench, name: str) -> list[dict[str, Any]]:
    """The figures of a part, each told at once; if it fails, what happened is the last of them."""
    end = time.monotonic() + PARTS[name]
    found = []
    try:
        for figure in WORK[name](bench, name, lambda: time.monotonic() < end):
            bench.tell(name, figure)
            found.append({"part": name, **figure})
    except Exception as error:  # out of memory, a kernel that fails: the other parts may do
        found.append({"part": name, "error": f"{type(error).__name__}: {error}"[:2000]})
        bench.tell(name, found[-1])
    _free(bench.device)
    return found


def _free(device: torch.device) -> None:
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _shown(figure: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figure.items()
    )


# -- the parts -----------------------------------------------------------------------------------------------------


def _rates(bench: Bench) -> tuple[Rates, dict[str, Any]]:
    from bridle.bench.gpu_probe import probe

    bench.rates, told = probe(bench.device, bench.dtype, quick=bench.settings.quick)
    return bench.rates, told


def _probe(bench: Bench, name: str, has_time: Callable[[], bool]) -> Figures:
    yield _rates(bench)[1]


def _race(bench: Bench, name: str, has_time: Callable[[], bool]) -> Figures:
    from bridle.bench.gpu_models import token_bytes_of
    from bridle.bench.gpu_speed import Race, race
    from bridle.model.memory import free_memory

    quick, is_large = bench.settings.quick, name == "8b"
    model = "toy" if quick else name
    batches = bench.settings.batches or ((1, 2) if quick else (1, 64, 256) if is_large else (1, 16, 64, 256))
    plan = Race(
        model=model,
        batches=batches,
        contexts=(16,) if quick else (256, 2_048),
        prompts=((2, 8), (1, 40)) if quick else ((8, 1_024), (1, 16_384)),
        num_steps=3 if quick else 48,
        peer_steps=3 if quick else 16,
        max_tokens=int(_CACHE_SHARE * free_memory(bench.device)) // token_bytes_of(model, bench.dtype),
    )
    rates = bench.rates or _rates(bench)[0]
    yield from race(plan, bench.device, bench.dtype, rates, has_time)


def _attention(bench: Bench, name: str, has_time: Callable[[], bool]) -> Figures:
    from bridle.bench.gpu_attention import AttentionScene, attention

    if bench.settings.quick:
        scenes = [AttentionScene("toy", 2, 24)]
    else:
        sizes = ((1, 1_024), (16, 1_024), (64, 1_024), (256, 1_024), (16, 16_384))
        scenes = [AttentionScene(model, *size) for model in ("0.6b", "8b") for size in sizes]
    rates = bench.rates or _rates(bench)[0]
    yield from attention(scenes, bench.device, bench.dtype, rates, has_time)


def _serve(bench: Bench, name: str, has_time: Callable[[], bool]) -> Figures:
    from bridle.bench.gpu_serving import serving

    yield from serving(*(("20m", 2, 6) if bench.settings.quick else ("0.5b", 64, 64)), has_time)


def _control(bench: Bench, name: str, has_time: Callable[[], bool]) -> Figures:
    from bridle.bench.gpu_steering import steer

    batch, num_steps = (4, 6) if bench.settings.quick else (64, 96)
    executor = _small(bench, batch, num_steps)
    try:
        yield from steer(executor, batch, num_steps, has_time)
    finally:
        executor.close()


def _lora(bench: Bench, name: str, has_time: Callable[[], bool]) -> Figures:
    from bridle.bench.gpu_steering import Mix, adapt

    batch, num_steps = (4, 3) if bench.settings.quick else (64, 64)
    mixes = [Mix("q and v", 1), Mix("q and v", 8), Mix("q and v", 64), Mix("q and v", 8, 2), Mix("all linear", 8)]
    executor = _small(bench, batch, num_steps)
    try:
        yield from adapt(executor, batch, num_steps, mixes[:1] if bench.settings.quick else mixes, has_time)
    finally:
        executor.close()


def _small(bench: Bench, batch: int, num_steps: int) -> Any:
    """The smaller model, with room for what control and adapters run."""
    from bridle.bench.gpu_models import make_executor

    name = "toy" if bench.settings.quick else "0.6b"
    room = batch * (8 * num_steps + 512)
    return make_executor(name, bench.device, bench.dtype, num_tokens=room, num_seqs=batch)[0]


WORK: dict[str, Callable[[Bench, str, Callable[[], bool]], Figures]] = {
    "probe": _probe,
    "0.6b": _race,
    "8b": _race,
    "attention": _attention,
    "control": _control,
    "lora": _lora,
    "serve": _serve,
}
