"""The process of one part of the validation of a GPU. The process measures, and prints each figure at once as a line of
JSON.

Models have random weights in well-known shapes, made on the device. Only the HTTP server's model is written to files,
which are removed afterwards. A warning of bridle during loading means that a slow fallback is used. Here it counts as a
failure. On a CPU the same code runs with tiny sizes (`--quick`), whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from scripts.card.probe import Rates

Figures = Iterator[dict[str, Any]]
#: Of the free memory, for keys and values; weights, a peer's and its cache have to have room beside them.
_CACHE_SHARE = 0.6
#: A part begins no further figure when so much of its time is left.
_LAST_SHARE = 0.1


@dataclass
class Bench:
    """The device, the time limit and the output folder of a part."""

    part: str
    quick: bool
    seconds: float
    folder: Path

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds * (1 - _LAST_SHARE)

    def has_time(self) -> bool:
        return time.monotonic() < self._end

    @cached_property
    def device(self) -> torch.device:
        from bridle.bench.roofline import bench_device

        device = bench_device()
        if device.type == "cpu" and not self.quick:
            raise SystemExit("there is no GPU here; --quick runs a toy on the CPU, to try the command itself")
        return device

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @cached_property
    def rates(self) -> Rates:
        """Return the device's memory bandwidth and arithmetic speed, measured in this process for comparison with
        figures."""
        from scripts.card.probe import probe

        return probe(self.device, self.dtype, quick=self.quick)[0]


class Warnings(logging.Handler):
    """A log handler that reports each warning of bridle as a failure."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell({"what": "warning", "failed": record.getMessage()})


def measure(bench: Bench, tell: Callable[[dict[str, Any]], None]) -> None:
    """Report all figures of a part. An error ends the part, and is reported as its last figure."""
    watch, logger = Warnings(tell), logging.getLogger("bridle")
    logger.addHandler(watch)
    try:
        for figure in WORK[bench.part](bench):
            tell(figure)
    except Exception as error:  # out of memory, a kernel that fails
        tell({"error": f"{type(error).__name__}: {error}"[:2000]})
    finally:
        logger.removeHandler(watch)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts.card.child")
    parser.add_argument("part", choices=list(WORK))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args(arguments)
    # Figures alone go to standard output: what libraries and processes of its own print goes to standard error.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(figure: dict[str, Any]) -> None:
        print(json.dumps(figure), file=lines, flush=True)

    logging.basicConfig(level=logging.INFO)
    measure(Bench(options.part, options.quick, options.seconds, options.out), tell)
    lines.flush()
    sys.stderr.flush()
    os._exit(0)  # a device that was lost does not let a process end by itself


# -- the parts -----------------------------------------------------------------------------------------------------


def _smoke(bench: Bench) -> Figures:
    from scripts.card.probe import probe
    from scripts.card.smoke import smoke

    bench.rates, told = probe(bench.device, bench.dtype, quick=bench.quick)
    yield told
    yield from smoke(bench.device, bench.dtype, quick=bench.quick)


def _load(bench: Bench) -> Figures:
    from scripts.card.smoke import load

    yield from load("toy" if bench.quick else "0.6b", bench.device, bench.dtype)


def _laws(bench: Bench) -> Figures:
    from scripts.card.programs import laws

    yield from laws(bench.folder, bench.seconds, quick=bench.quick)


def _race(bench: Bench) -> Figures:
    from scripts.card.speed import race

    yield from race(_plan(bench, bench.part), bench.device, bench.dtype, bench.rates, bench.has_time)


def _peers(bench: Bench) -> Figures:
    from scripts.card.speed import peers

    for name in ("0.6b", "8b"):
        if bench.has_time():
            yield from peers(_plan(bench, name), bench.device, bench.dtype, bench.has_time)


def _plan(bench: Bench, name: str) -> Any:
    from bridle.model.memory import free_memory
    from scripts.card.models import token_bytes_of
    from scripts.card.speed import Race

    quick = bench.quick
    model = "toy" if quick else name
    return Race(
        model=model,
        batches=(1, 2) if quick else (1, 16, 64, 256),
        contexts=(16,) if quick else (1_024,),
        prompts=((2, 8), (1, 40)) if quick else ((8, 1_024), (1, 4_096), (1, 16_384)),
        num_steps=3 if quick else 48,
        peer_steps=3 if quick else 16,
        max_tokens=int(_CACHE_SHARE * free_memory(bench.device)) // token_bytes_of(model, bench.dtype),
        filtered=(2,) if quick else (64, 256),
        joining=8 if quick else 100,
    )


def _attention(bench: Bench) -> Figures:
    from scripts.card.attention import SCENES, TOYS, attention, blocks, prompts

    scenes = TOYS if bench.quick else SCENES
    yield from attention(scenes, bench.device, bench.dtype, bench.rates, bench.has_time)
    lengths = (24,) if bench.quick else (1_024, 4_096, 16_384)
    yield from prompts(scenes[0].model, lengths, bench.device, bench.dtype, bench.has_time)
    if bench.device.type == "cuda":
        yield from blocks(scenes, bench.device, bench.dtype, bench.rates, bench.has_time)


def _counters(bench: Bench) -> Figures:
    from scripts.card.programs import counters

    yield from counters(bench.seconds, quick=bench.quick)


def _sanitizer(bench: Bench) -> Figures:
    from scripts.card.programs import sanitizer

    yield from sanitizer(bench.seconds, quick=bench.quick)


def _serve(bench: Bench) -> Figures:
    from scripts.card.serving import serving

    yield from serving(*(("20m", 2, 6) if bench.quick else ("0.5b", 64, 64)), bench.has_time)


def _control(bench: Bench) -> Figures:
    from scripts.card import steering, wasm

    batch, num_steps = (4, 6) if bench.quick else (64, 96)
    executor = _small(bench, batch, num_steps)
    base = 0.0
    try:
        for figure in steering.steer(executor, batch, num_steps, bench.has_time):
            base = base or figure["tokens_per_second"]
            yield figure
        yield from wasm.steer(executor, batch, num_steps, base, bench.has_time)
    finally:
        executor.close()


def _lora(bench: Bench) -> Figures:
    from scripts.card.steering import Mix, adapt

    batch, num_steps = (4, 3) if bench.quick else (64, 64)
    mixes = [Mix("q and v", 1), Mix("q and v", 8), Mix("q and v", 64), Mix("q and v", 8, 2), Mix("all linear", 8)]
    executor = _small(bench, batch, num_steps)
    try:
        yield from adapt(executor, batch, num_steps, mixes[:1] if bench.quick else mixes, bench.has_time)
    finally:
        executor.close()


def _small(bench: Bench, batch: int, num_steps: int) -> Any:
    """Return an executor over the smaller model, with enough KV for the parts about controllers and adapters."""
    from scripts.card.models import make_executor

    name = "toy" if bench.quick else "0.6b"
    room = batch * (8 * num_steps + 512)
    return make_executor(name, bench.device, bench.dtype, num_tokens=room, num_seqs=batch)[0]


WORK: dict[str, Callable[[Bench], Figures]] = {
    "smoke": _smoke,
    "load": _load,
    "laws": _laws,
    "attention": _attention,
    "8b": _race,
    "0.6b": _race,
    "lora": _lora,
    "control": _control,
    "serve": _serve,
    "peers": _peers,
    "sanitizer": _sanitizer,
    "counters": _counters,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
