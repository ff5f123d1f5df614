"""Cost of controllers and adapters on a GPU. The same sequences run with masks, forced tokens, forks, Python
controllers and adapters, each compared with none."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridle.bench.baselines import Stopwatch
from bridle.config import EngineConfig
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine import Branch, Decision, Engine, Request
from bridle.engine.control.decision import mask_of
from bridle.lora import AdapterPool, open_adapter, require_device
from bridle.model.executor import LocalExecutor
from bridle.model.graph_kinds import GraphKind
from bridle.model.graphs import StepGraphs
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams
from dev.bench.adapters import make_adapters
from scripts.card.speed import WARM_UP, prompts_of

Figures = Iterator[dict[str, Any]]
_CONTEXT = 64
_FORCED = (5, 6, 7, 8)
_HOST_MEMORY = 16 << 30


class Masked(Controller):
    """Allows every second token of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = mask_of(range(3, vocab_size, 2), vocab_size)

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(mask=self._mask)


class Forcing(Controller):
    """Alternates: samples four tokens, then forces four."""

    def next(self, view: SequenceView) -> Decision:
        if len(view.generated) % 8 == 4:
            return Decision.splice(0, _FORCED)
        return Decision.sample()


class ForkingController(Controller):
    """Forks one output into four at its first token."""

    has_forked = False

    def next(self, view: SequenceView) -> Decision:
        if self.has_forked:
            return Decision.sample()
        self.has_forked = True
        return Decision.fork([Branch()] * 4)


class Idle(Controller):
    """Is asked before each token, and always answers "sample"."""

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample()


@dataclass(frozen=True, slots=True)
class SteeringScene:
    """Requests of one measurement: their number, and the controller of each request by its index."""

    name: str
    num_requests: int
    controller: Callable[[int], Controller | None]


def scenes(batch: int, vocab_size: int) -> list[SteeringScene]:
    """Return the scenes, each with `batch` requests."""
    masked = Masked(vocab_size)
    return [
        SteeringScene("none", batch, lambda number: None),
        SteeringScene("masks on all rows", batch, lambda number: masked),
        SteeringScene("masks on half the rows", batch, lambda number: masked if number % 2 else None),
        SteeringScene("4 of 8 tokens forced", batch, lambda number: Forcing()),
        SteeringScene("forks of 4", max(batch // 4, 1), lambda number: ForkingController()),
        SteeringScene("an idle controller", batch, lambda number: Idle()),
    ]


def steer(executor: LocalExecutor, batch: int, num_steps: int, has_time: Callable[[], bool]) -> Figures:
    """Yield the tokens per second of each scene, also relative to the first scene."""
    base = 0.0
    vocab_size = executor.info.vocab_size
    for scene in scenes(batch, vocab_size):
        if not has_time():
            return
        engine = engine_over(executor, pools=[PythonControllerPool(vocab_size)])
        speed = speed_of(engine, requests_of(scene, num_steps, vocab_size), num_steps)
        base = base or speed["tokens_per_second"]
        yield {"what": scene.name, "batch": batch, **speed, "ratio": speed["tokens_per_second"] / base}


def requests_of(scene: SteeringScene, num_steps: int, vocab_size: int) -> list[Request]:
    """Return the requests of a scene, long enough for the measured steps."""
    # Whoever forces tokens has eight of them in the steps of four.
    sampling = SamplingParams(max_tokens=4 * (num_steps + WARM_UP) + 64, temperature=0.0, ignore_eos=True)
    return [
        Request(str(number), tuple(prompt), sampling, controller=scene.controller(number), detokenize=False)
        for number, prompt in enumerate(prompts_of(scene.num_requests, _CONTEXT, vocab_size))
    ]


def speed_of(engine: Engine, requests: Sequence[Request], num_steps: int) -> dict[str, Any]:
    """Return the speed of steps after all requests have begun to decode. The requests are cancelled afterwards, and the
    executor stays open."""
    for request in requests:
        engine.add(request)
    begun: set[str] = set()
    while len(begun) < len(requests):
        begun |= {event.request_id for event in _stepped(engine)}
    for _ in range(WARM_UP):
        _stepped(engine)
    watch = Stopwatch()
    num_tokens = sum(len(_stepped(engine)) for _ in range(num_steps))
    run = watch.stop([])
    for request in requests:
        engine.cancel(request.id)
    while engine.has_work:
        engine.step()
    return {
        "tokens_per_second": num_tokens / run.seconds,
        "step_ms": 1e3 * run.seconds / num_steps,
        "cpu_ms": 1e3 * run.cpu_seconds / num_steps,
    }


def _stepped(engine: Engine) -> list[TokenEvent]:
    tokens = []
    for event in engine.step():
        if isinstance(event, TokenEvent):
            tokens.append(event)
        elif isinstance(event, Finished) and event.error is not None:
            raise event.error
    return tokens


@dataclass(frozen=True, slots=True)
class Mix:
    """Adapters that every `stride`th sequence uses in rotation."""

    targets: str
    num_adapters: int
    stride: int = 1


def adapt(
    executor: LocalExecutor, batch: int, num_steps: int, mixes: Sequence[Mix], has_time: Callable[[], bool]
) -> Figures:
    """Yield the tokens per second with adapters of rank 16, also relative to the speed without adapters."""
    vocab_size = executor.info.vocab_size
    plain = SteeringScene("none", batch, lambda number: None)
    base = speed_of(engine_over(executor), requests_of(plain, num_steps, vocab_size), num_steps)
    yield {"what": "none", "batch": batch, **base}
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        for number, mix in enumerate(mixes):
            if not has_time():
                return
            speed = _adapted(executor, batch, num_steps, mix, Path(folder) / str(number))
            ratio = speed["tokens_per_second"] / base["tokens_per_second"]
            share = f", 1 of {mix.stride} rows" if mix.stride > 1 else ""
            told = {"what": f"{mix.num_adapters}, {mix.targets}{share}", "batch": batch, **speed, "ratio": ratio}
            if lacks_graphs(executor):
                told["failed"] = "steps with adapters run without CUDA graphs"
            yield told


def lacks_graphs(executor: LocalExecutor) -> bool:
    """Return whether steps with adapters lack CUDA graphs, although steps without adapters have them on CUDA."""
    graphs, kind = executor.runner.graphs, GraphKind(has_adapters=True)
    has_graphs = isinstance(graphs, StepGraphs) and bool(graphs.sizes_of(kind))
    return executor.info.device.startswith("cuda") and not has_graphs


def engine_over(executor: LocalExecutor, **further: Any) -> Engine:
    """Return a new engine over the executor, whose step counter starts again."""
    executor.reset()
    return Engine(executor, EngineConfig(enable_prefix_caching=False), **further)


def _adapted(executor: LocalExecutor, batch: int, num_steps: int, mix: Mix, folder: Path) -> dict[str, Any]:
    device = require_device(executor)
    files = [open_adapter(path) for path in make_adapters(folder, device.layers, mix.targets, mix.num_adapters)]
    room = sum(2 * one.num_bytes for one in files)  # twice, if the model is in float32
    pool = AdapterPool(device, item_size=4, device_memory=room, host_memory=_HOST_MEMORY)
    try:
        keys = [str(number) for number in range(len(files))]
        for key, one in zip(keys, files, strict=True):
            pool.add(key, one)
            pool.fetch(key).result()
        while len(pool.begin_step(keys)) < len(keys):
            time.sleep(0.01)
        requests = [
            replace(request, adapter=None if number % mix.stride else keys[number // mix.stride % len(keys)])
            for number, request in enumerate(
                requests_of(SteeringScene("", batch, lambda number: None), num_steps, executor.info.vocab_size)
            )
        ]
        return speed_of(engine_over(executor, adapters=pool), requests, num_steps)
    finally:
        pool.close()
        executor.reset()
        device.clear()
