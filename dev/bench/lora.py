"""Many adapters in one batch: generated tokens per second with no adapter up to hundreds, compared with PEFT, which
switches between adapters.

Every measurement keeps the same number of sequences running at once. When a sequence ends, a new one starts with the
next adapter, so that adapters are loaded and evicted as in a real server. All measurements share one model, one process
and the same lengths of prompts and outputs. The scenes are measured in turns, and each figure is the median of its
rounds. The processor time of all threads is reported as well, because other work on the machine affects it less. PEFT
computes the requests of each adapter as a separate batch, one adapter after the other. On a GPU, the adapters' matrix
products are also measured alone, by the fused kernels and in plain torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.baselines import Stopwatch
from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.config import EngineConfig, ModelConfig
from bridle.distribution import install_hint
from bridle.engine.request import Request
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams
from dev.bench.adapters import make_adapters
from dev.bench.switching import SwitchingPeer

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.engine import Engine
    from bridle.lora import AdapterPool
    from bridle.model.executor import LocalExecutor

_PROMPT_TOKENS = 16
_LENGTHS = (24, 40)  # minimum and maximum length of outputs
_HOST_MEMORY = 16 << 30
_PEFT = "PEFT"


@dataclass(frozen=True, slots=True)
class LoraScene:
    """One measured scene: `num_adapters` adapters in rotation, on every sequence or on a `share` of the sequences.
    `resident` is the number of adapters that fit on the device at once (0: all)."""

    name: str
    targets: str = "q and v"
    num_adapters: int = 0
    share: float = 1.0
    resident: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """Scale of the measurement: simultaneous sequences, total tokens before and during the measurement, and rounds."""

    batch: int
    num_warm: int
    num_tokens: int
    num_rounds: int
    num_peft_tokens: int
    num_many: int  # adapters in rotation


@dataclass(slots=True)
class LoraFigure:
    """Speeds of one scene in generated tokens per second. `ratio` is relative to the scene without adapters, and
    `cpu_ratio` is the same ratio in processor time. `base` is the speed of the sequences without an adapter, relative
    to the same number of sequences in a batch without adapters."""

    name: str
    targets: str
    num_adapters: int
    tokens_per_second: float
    tokens_per_cpu_second: float
    ratio: float = 1.0
    cpu_ratio: float = 1.0
    base: float | None = None
    distinct: float = 0.0  # adapters per step
    num_placed: int = 0  # adapters that were loaded to the device during the measurement


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run all scenes in turns, then PEFT. Prints one table."""
    import torch

    from dev.bench.lora_products import measure_products

    size, name = _choose_size(settings), _choose_model(settings)
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        checkpoint = make_checkpoint(name, Path(folder))
        figures = _measure_bridle(checkpoint, Path(folder) / "adapters", size, settings, phases)
        with phases.part(_PEFT):
            figures += _measure_peft(checkpoint, Path(folder) / "adapters", size, console)
    _compare(figures)
    _print_table(console, checkpoint, size, figures)
    products = measure_products(console) if torch.cuda.is_available() else []
    return {
        "model": name,
        "size": asdict(size),
        "figures": [asdict(figure) for figure in figures],
        "products": [asdict(figure) for figure in products],
    }


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each round over all scenes, and of PEFT. They include steps of all sequences and
    the prompts of sequences that replace ended ones. The estimate for PEFT assumes that PEFT computes the adapters one
    after the other."""
    size, checkpoint = _choose_size(settings), planned_checkpoint(_choose_model(settings))
    num_steps = (size.num_warm + size.num_tokens) / size.batch

    def run(steps: float) -> float:
        return limits.seconds(checkpoint, size.batch * (steps + _PROMPT_TOKENS), steps)

    scenes = len(_scenes(size)) * run(num_steps)
    peft = sum(min(count, size.batch) * run(size.num_peft_tokens) for count in (1, 4, 32))
    return {f"round {number + 1}": scenes for number in range(size.num_rounds)} | {_PEFT: peft}


def _choose_model(settings: BenchSettings) -> str:
    return settings.model_sizes[0] if settings.model_sizes else ("20m" if settings.quick else "0.5b")


def _choose_size(settings: BenchSettings) -> Size:
    batch = settings.batches[0] if settings.batches else (16 if settings.quick else 64)
    if settings.quick:
        return Size(batch, 8 * batch, 24 * batch, 2, 4, 48)
    return Size(batch, 8 * batch, 20 * batch, 3, 12, 256)


def _scenes(size: Size) -> list[LoraScene]:
    many, room = size.num_many, size.batch + size.batch // 8  # little more than a step needs: most that come are away
    return [
        LoraScene("none"),
        LoraScene("1 adapter", num_adapters=1),
        LoraScene("4 adapters", num_adapters=4),
        LoraScene("32 adapters", num_adapters=32),
        LoraScene(f"{many} in rotation", num_adapters=many),
        LoraScene(f"{many}, {room} resident", num_adapters=many, resident=room),
        LoraScene("32 adapters there, on no row", num_adapters=32, share=0.0),
        LoraScene("4 adapters, half the rows", num_adapters=4, share=0.5),
        LoraScene("32 adapters, half the rows", num_adapters=32, share=0.5),
        LoraScene("4 adapters", targets="all linear", num_adapters=4),
        LoraScene("32 adapters", targets="all linear", num_adapters=32),
    ]


# -- bridle ------------------------------------------------------------------------------------------------------


def _measure_bridle(
    checkpoint: BenchCheckpoint, folder: Path, size: Size, settings: BenchSettings, phases: Phases
) -> list[LoraFigure]:
    from bridle.model import load_executor

    scenes = _scenes(size)
    runs: dict[LoraScene, list[LoraFigure]] = {scene: [] for scene in scenes}
    capacity = size.batch * (_PROMPT_TOKENS + _LENGTHS[1] + 16)
    config = ModelConfig(
        str(checkpoint.path), num_threads=settings.threads, kv_memory=capacity * checkpoint.token_bytes
    )
    from bridle.lora import require_device
    from bridle.model.executor import LocalExecutor

    executor = load_executor(config)
    assert isinstance(executor, LocalExecutor)  # the checkpoint is a decoder
    try:
        paths = {
            targets: make_adapters(folder, require_device(executor).layers, targets, count)
            for targets, count in (("q and v", size.num_many), ("all linear", 32))
        }
        for number in range(size.num_rounds):
            shift = number % len(scenes)
            with phases.part(f"round {number + 1}"):
                for scene in (*scenes[shift:], *scenes[:shift]):
                    runs[scene].append(_run_scene(executor, scene, paths[scene.targets], size))
    finally:
        executor.close()
    return [_median(figures) for figures in runs.values()]


def _run_scene(executor: LocalExecutor, scene: LoraScene, paths: list[Path], size: Size) -> LoraFigure:
    with _engine(executor, scene, paths[: scene.num_adapters], size) as (engine, pool):
        feed = _Feed(engine, scene, size)
        feed.run(size.num_warm)
        placed, watch = pool.num_placed, Stopwatch()
        feed.run(size.num_tokens)
        run = watch.stop([])
        speeds = feed.num_tokens / run.seconds, feed.num_tokens / run.cpu_seconds
        figure = LoraFigure(scene.name, scene.targets, scene.num_adapters, *speeds)
        figure.distinct, figure.num_placed = feed.num_distinct / feed.num_steps, pool.num_placed - placed
        if scene.share < 1:
            figure.base = feed.num_base_tokens / run.seconds / (1 - scene.share)  # scaled to a batch without adapters
        return figure


@contextmanager
def _engine(
    executor: LocalExecutor, scene: LoraScene, paths: list[Path], size: Size
) -> Iterator[tuple[Engine, AdapterPool]]:
    """Yield an engine for one scene, with its adapter pool; the engines of all scenes share the executor."""
    from bridle.engine import Engine
    from bridle.lora import AdapterPool, open_adapter, require_device

    device = require_device(executor)
    files = [open_adapter(path) for path in paths]
    # float32 needs twice the bytes of bfloat16 files
    per_adapter = max((2 * one.num_bytes for one in files), default=0)
    memory = (scene.resident or len(files)) * per_adapter
    pool = AdapterPool(device, item_size=4, device_memory=max(memory, 1), host_memory=_HOST_MEMORY)
    with ExitStack() as stack:
        stack.callback(device.clear)
        stack.callback(executor.reset)
        stack.callback(pool.close)
        for number, one in enumerate(files):
            pool.add(str(number), one)
        keys = [str(number) for number in range(len(files))]
        for key in keys:
            pool.fetch(key).result()
        while len(pool.begin_step(keys[: scene.resident or len(keys)])) < (scene.resident or len(keys)):
            time.sleep(0.01)
        config = EngineConfig(enable_prefix_caching=False, max_num_seqs=size.batch)
        yield Engine(executor, config, adapters=pool), pool


class _Feed:
    """Keeps the same number of requests running at once. The requests' lengths differ, so that they end one by one."""

    def __init__(self, engine: Engine, scene: LoraScene, size: Size) -> None:
        self._engine = engine
        self._scene = scene
        self._vocab_size = engine.info.vocab_size
        self._adapters: dict[str, str | None] = {}  # of live requests
        self._num_requests = 0
        self.num_tokens = self.num_base_tokens = self.num_steps = self.num_distinct = 0
        for number in range(size.batch):
            self._add(num_new=1 + number * _LENGTHS[1] // size.batch)  # different lengths, so that not all end at once

    def _add(self, num_new: int) -> None:
        number = self._num_requests
        self._num_requests += 1
        prompt = tuple((7 * i + 13 * number) % (self._vocab_size - 3) + 3 for i in range(_PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        adapter = self._adapter_of(number)
        self._adapters[str(number)] = adapter
        self._engine.add(Request(str(number), prompt, sampling, adapter=adapter, detokenize=False))

    def _adapter_of(self, number: int) -> str | None:
        scene = self._scene
        if not scene.num_adapters or not scene.share or (number * scene.share) % 1:
            return None
        return str(int(number * scene.share) % scene.num_adapters)

    def run(self, num_tokens: int) -> None:
        """Step until `num_tokens` more tokens were generated; reset the counts."""
        self.num_tokens = self.num_base_tokens = self.num_steps = self.num_distinct = 0
        while self.num_tokens < num_tokens:
            seen: set[str] = set()
            for event in self._engine.step():
                if isinstance(event, TokenEvent):
                    adapter = self._adapters[event.request_id]
                    self.num_tokens += 1
                    self.num_base_tokens += adapter is None
                    seen |= set() if adapter is None else {adapter}
                elif isinstance(event, Finished):
                    if event.error is not None:
                        raise event.error
                    del self._adapters[event.request_id]
                    self._add(_LENGTHS[0] + self._num_requests % (_LENGTHS[1] - _LENGTHS[0] + 1))
            self.num_steps += 1
            self.num_distinct += len(seen)


def _median(figures: list[LoraFigure]) -> LoraFigure:
    bases = [figure.base for figure in figures if figure.base is not None]
    return replace(
        figures[-1],
        tokens_per_second=median(figure.tokens_per_second for figure in figures),
        tokens_per_cpu_second=median(figure.tokens_per_cpu_second for figure in figures),
        base=median(bases) if bases else None,
    )


def _measure_peft(checkpoint: BenchCheckpoint, folder: Path, size: Size, console: Console) -> list[LoraFigure]:
    """Measure PEFT with the same number of sequences, each adapter's sequences as one batch, one after the other."""
    paths = sorted(folder.glob("q-and-v-*"), key=lambda path: int(path.name.rpartition("-")[2]))[:32]
    peer = SwitchingPeer.load(checkpoint, paths)
    if peer is None:
        console.print(f"PEFT is not installed ({install_hint('bench')}): measured without it")
        return []
    figures = []
    for count in (1, 4, 32):
        peer.generate(count, size.batch, _PROMPT_TOKENS, 1)
        run = peer.generate(count, size.batch, _PROMPT_TOKENS, size.num_peft_tokens)
        num_tokens = sum(map(len, run.outputs))
        speeds = num_tokens / run.seconds, num_tokens / run.cpu_seconds
        name = f"PEFT, {count} adapter{'s' if count > 1 else ''}"
        figures.append(LoraFigure(name, "q and v", count, *speeds, distinct=1.0))
    return figures


# -- telling -----------------------------------------------------------------------------------------------------


def _compare(figures: list[LoraFigure]) -> None:
    plain = figures[0]
    for figure in figures:
        figure.ratio = figure.tokens_per_second / plain.tokens_per_second
        figure.cpu_ratio = figure.tokens_per_cpu_second / plain.tokens_per_cpu_second
        if figure.base is not None:
            figure.base /= plain.tokens_per_second


def _print_table(console: Console, checkpoint: BenchCheckpoint, size: Size, figures: list[LoraFigure]) -> None:
    from rich.table import Table

    table = Table(
        title=f"{checkpoint.name}: {size.batch} sequences at once, adapters of rank 16",
        caption="x: times the speed without adapters, by the clock and in CPU time; base: that of rows without one; "
        "mix: adapters in a step; new: brought to the device meanwhile",
    )
    for heading in ("", "tok/s", "x", "x CPU", "base", "mix", "new"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for figure in figures:
        base = "" if figure.base is None else f"{figure.base:.2f}"
        ratios = f"{figure.ratio:.2f}", f"{figure.cpu_ratio:.2f}"
        cells = (f"{figure.tokens_per_second:.1f}", *ratios, base, f"{figure.distinct:.1f}", str(figure.num_placed))
        table.add_row(figure.name if figure.targets == "q and v" else f"{figure.name}, {figure.targets}", *cells)
    console.print(table)
