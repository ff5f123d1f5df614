"""Cost of Wasm controllers on a GPU: every sequence has a controller, which runs in another process, compared with no
controllers.

One controller allows every token. The other one computes its masks by walking the whole vocabulary in each step, so it
measures the processor as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridle.bench import control_guests as guests
from bridle.model.executor import LocalExecutor
from scripts.card.steering import SteeringScene, engine_over, requests_of, speed_of

Figures = Iterator[dict[str, Any]]
#: What the runtime imports.
NEEDED = ("posix_ipc", "wasmtime")
_MODULES = {"Wasm controllers": guests.trivial, "Wasm controllers with masks": guests.walk}


def steer(executor: LocalExecutor, batch: int, num_steps: int, base: float, has_time: Callable[[], bool]) -> Figures:
    """Yield the tokens per second with each module, also relative to `base`, the speed without controllers. Missing
    packages are a failure."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        yield {"what": "Wasm controllers", "failed": f"Wasm controllers need {', '.join(lacking)}"}
    elif has_time():
        with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
            yield from _steered(executor, batch, num_steps, base, has_time, Path(folder))


def _steered(
    executor: LocalExecutor, batch: int, num_steps: int, base: float, has_time: Callable[[], bool], folder: Path
) -> Figures:
    from bridle.aici.client import WasmController
    from bridle.bench.control_device import Borrowed, runtime_pool, upload

    vocab_size = executor.info.vocab_size
    tokenizer = guests.write_tokenizer(folder / "tokenizer", vocab_size)
    with runtime_pool(tokenizer, folder / "store", vocab_size, "--wasm-max-step-time", "500") as pool:
        for name, make in _MODULES.items():
            if not has_time():
                return
            controller = WasmController(upload(pool, make()), "")
            scene = SteeringScene(name, batch, lambda number, controller=controller: controller)  # type: ignore[misc]
            engine = engine_over(executor, pools=[Borrowed(pool)])
            speed = speed_of(engine, requests_of(scene, num_steps, vocab_size), num_steps)
            pool.settle()  # the next engine numbers its sequences anew
            yield {"what": name, "batch": batch, **speed, "ratio": speed["tokens_per_second"] / base}
