"""Measures services on top of the engine, for `bridle bench cpu`: HTTP, controllers, LMTP. Weights are int8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.baselines import BridlePeer
from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.control_device import runtime_pool
from bridle.bench.control_programs import slowdown
from bridle.bench.engine import make_prompts
from bridle.bench.load_report import best, timed
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.serve import run
from bridle.bench.serve_process import http_server
from bridle.bench.settings import BenchSettings
from bridle.bench.sse_client import closed_loop
from bridle.config import ModelConfig, Quantization

if TYPE_CHECKING:
    from rich.console import Console

_STREAMS = 16
_KV_TOKENS = 1 << 14
_FORM: Quantization = "int8"


def over_http(checkpoint: BenchCheckpoint, folder: Path, settings: BenchSettings, console: Console) -> dict[str, Any]:
    """Measure sixteen streams over HTTP, compared with the same engine without HTTP, in turns; the best run of each
    counts."""
    num_requests, num_new, num_rounds = (48, 16, 2) if settings.quick else (96, 64, 4)
    prompts = make_prompts(num_requests, checkpoint.vocab_size)
    options = ("--control", "off", "--no-prefix-caching", "--quantization", _FORM)
    room = ("--kv-memory", str(checkpoint.token_bytes * _KV_TOKENS))
    shared: dict[str, Any] = {"num_threads": settings.threads, "capacity": _KV_TOKENS, "max_num_seqs": _STREAMS}
    with http_server(checkpoint.path, folder, *options, *room, threads=settings.threads) as server:
        peer = BridlePeer(checkpoint, quantization=_FORM, **shared)
        offline, rows = [], []
        try:
            peer.generate(prompts[:2], 2)  # make now what would be made lazily
            run(closed_loop(server.target, prompts[:2], 2, 1))
            for _ in range(num_rounds):
                offline.append(num_requests * num_new / peer.generate(prompts, num_new).seconds)
                load = closed_loop(server.target, prompts, num_new, _STREAMS)
                rows.append(run(timed(f"{_STREAMS} clients", server, load))[0])
        finally:
            peer.close()
    sixteen = best(rows)
    share = sixteen.tokens_per_second / max(offline)
    console.print(
        f"{checkpoint.name} {_FORM}, {_STREAMS} streams: engine {max(offline):.1f} tokens/s, over HTTP "
        f"{sixteen.tokens_per_second:.1f}, {share:.0%} of it"
    )
    return {"form": _FORM, "offline_tokens_per_second": max(offline), "share": share, "row": asdict(sixteen)}


def of_control(checkpoint: BenchCheckpoint, folder: Path, settings: BenchSettings, console: Console) -> dict[str, Any]:
    """Measure steps of 8 sequences with and without controllers, in turns; figures are medians."""
    from bridle.model import load_executor

    config = ModelConfig(str(checkpoint.path), quantization=_FORM, num_threads=settings.threads, kv_memory=1 << 28)
    executor = load_executor(config)
    limits = ("--wasm-max-step-time", "500")
    try:
        with runtime_pool(
            checkpoint.path / "tokenizer.json", folder / "controllers", checkpoint.vocab_size, *limits
        ) as pool:
            rows = slowdown(executor, pool, quick=settings.quick)
    finally:
        executor.close()
    for row in rows:
        console.print(
            f"{checkpoint.name} {_FORM}, 8 sequences, controller {row['controller']}: a step takes "
            f"{row['step_milliseconds']:.2f} ms, {row['slowdown']:.3f} times that without"
        )
    return {"form": _FORM, "rows": rows}


def over_lmtp(checkpoint: BenchCheckpoint, folder: Path, settings: BenchSettings, console: Console) -> dict[str, Any]:
    """Measure LMTP with one stream, compared with LMQL's own server if LMQL is installed. Both servers compute in
    float32."""
    from dev.bench import lmql, lmtp

    place = settings.lmql or lmql.default_folder()
    if not lmql.has_lmql(place / "bin" / "python"):
        reason = f"not measured: LMQL {lmql.VERSION} is not installed in {place}; `bridle bench lmtp` installs it"
        console.print(f"{checkpoint.name}, LMTP: {reason}")
        return {"skipped": reason}
    from rich.console import Console as Screen

    alone = replace(settings, batches=(1,), model_sizes=(checkpoint.name,))
    return lmtp.measure(alone, console, Phases(lmtp.guesses(alone, MachineLimits.now()), Screen(quiet=True)))


SERVICE: dict[str, Callable[[BenchCheckpoint, Path, BenchSettings, Console], dict[str, Any]]] = {
    "http": over_http,
    "control": of_control,
    "lmtp": over_lmtp,
}
