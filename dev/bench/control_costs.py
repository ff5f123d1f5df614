"""Costs of controllers apart from steps: upload, start, forks and memory."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from bridle.aici.client import RuntimePool, WasmController
from bridle.bench.control_device import InstantExecutor, members, runtime_pool, upload
from bridle.bench.control_guests import trivial
from bridle.engine import Branch, Decision, Engine, Request, Splice
from bridle.sampling import SamplingParams
from dev.bench import control_guests as guests

_CONTEXT = 32_768
_BLOCK = 16
_OUTPUTS = 16


def startup(tokenizer: Path, folder: Path, vocab_size: int, *, quick: bool) -> dict[str, Any]:
    """Measure the time from upload to readiness, a second upload of the same bytes, instances from the compile cache,
    and each instance's memory."""
    num_instances = 20 if quick else 100
    limit = ("--limit", f"max_instances={num_instances + 8}", "--wasm-max-init-time", "10000")
    with runtime_pool(tokenizer, folder / "store-costs", vocab_size, *limit) as pool:
        small, large = trivial(), guests.heavy(60 if quick else 400)
        sizes = {"small": small, "code": large, "padded": guests.padded(small, 1 << 20)}
        uploads = {name: _upload_figures(pool, wasm) for name, wasm in sizes.items()}
        module = upload(pool, small)
        _open(pool, module, 0, 1)  # starts the worker, which loads the code
        before = group_memory(pool.runtime_pid)
        times = _open(pool, module, 1, num_instances)
        after = group_memory(pool.runtime_pid)
    times.sort()
    return {
        "uploads": uploads,
        "instances": num_instances,
        "instantiate_p50_milliseconds": 1e3 * median(times),
        "instantiate_p99_milliseconds": 1e3 * times[int(0.99 * (len(times) - 1))],
        "instance_bytes": (after - before) // num_instances,
    }


def _upload_figures(pool: RuntimePool, wasm: bytes) -> dict[str, Any]:
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        upload(pool, wasm)
        times.append(time.perf_counter() - begin)
    return {"bytes": len(wasm), "first_milliseconds": 1e3 * times[0], "again_milliseconds": 1e3 * times[1]}


def _open(pool: RuntimePool, module: str, first: int, count: int) -> list[float]:
    """Start `count` instances one after the other; return the seconds of each, from the engine's request until the
    prompt is known."""
    times = []
    for number in range(first, first + count):
        request = Request(f"cost-{number}", (1, 2, 3), SamplingParams(), controller=WasmController(module))
        begin = time.perf_counter()
        pool.open(request).result(60)
        times.append(time.perf_counter() - begin)
    return times


def group_memory(group: int | None) -> int:
    """Return the bytes that the processes of a process group use. Shared memory is divided among the processes that
    share it (PSS)."""
    total = 0
    for pid in members(group):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return 1024 * total


def long_fork(*, quick: bool) -> list[dict[str, Any]]:
    """Fork one sequence of 32k tokens into 16, at the end of a KV block and within one.

    Measures the time of the forking step compared with a plain step, and the number of copied blocks. Also measures how
    many more KV blocks are in use after every output has sampled 8 tokens. The controller is plain Python and the
    device computes nothing, so the step's time is the engine's own work.
    """
    figures = []
    for place, num_drawn in (("at a block's end", _BLOCK), ("within a block", _BLOCK // 2)):
        rounds = [_fork_once(num_drawn) for _ in range(3 if quick else 9)]
        medians = {name: median(one[name] for one in rounds) for name in rounds[0]}
        figures.append({"fork": place, "context": _CONTEXT + num_drawn, "outputs": _OUTPUTS, **medians})
    return figures


def _fork_once(num_drawn: int) -> dict[str, float]:
    from bridle.controllers import PythonControllerPool

    executor = InstantExecutor(4, _CONTEXT + 256, block_size=_BLOCK)
    engine = Engine(executor, pools=[PythonControllerPool(executor.info.vocab_size)])
    prompt = tuple(i * 7 % 30_000 for i in range(_CONTEXT))
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    engine.add(Request("long", prompt, sampling, controller=_forking(num_drawn), detokenize=False))
    steps: list[float] = []
    forked = free = used = 0.0
    while engine.has_work:
        before = engine.statistics()
        begin = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begin
        after = engine.statistics()
        if after.num_forks > before.num_forks:
            forked, free = seconds, before.num_free_blocks
        elif after.num_sampled_tokens == before.num_sampled_tokens + 1:
            steps.append(seconds)
        used = max(used, free - after.num_free_blocks)
    copied = engine.statistics().num_copied_blocks
    engine.close()
    return {
        "fork_milliseconds": 1e3 * forked / (_OUTPUTS - 1),
        "plain_step_milliseconds": 1e3 * median(steps),
        "blocks_copied": copied,
        "blocks_taken": used,
    }


def _forking(num_drawn: int) -> Any:
    from bridle.controllers import Controller, SequenceView

    class Forking(Controller):
        """Samples a number of tokens, forks into sixteen outputs, and samples eight more tokens in each."""

        forked = False

        def next(self, view: SequenceView) -> Decision:
            length = len(view.tokens) - view.num_prompt
            if length == num_drawn and not self.forked:
                self.forked = True
                return Decision.fork(Branch(sample=False, splices=(Splice(0, (i + 1,)),)) for i in range(_OUTPUTS))
            return Decision.sample() if length < num_drawn + 8 else Decision.stop()

    return Forking()
