"""From a model's name to something that answers: checkpoint, tokenizer, engine, and the thread that drives
it.

The heavy imports (torch, transformers) happen inside `load_model`, so that the rest of the service can be
imported and tested without them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bridle.config import EngineConfig, ModelConfig

if TYPE_CHECKING:
    from bridle.aici.client import RuntimeConfig, RuntimePool
    from bridle.engine.client import EngineClient
    from bridle.engine.interfaces import ControllerPool, ExecutorInfo, Sampler
    from bridle.text import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

_NUM_TEXT_THREADS = 2


@dataclass(slots=True)
class LoadedModel:
    """A model that takes requests. `created` is a Unix time in seconds; `adapters` are the names it can
    apply, `control` is the runtime of its Wasm controllers."""

    name: str
    client: EngineClient
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: frozenset[str] = frozenset()
    control: RuntimePool | None = None
    shutdown: Callable[[float], None] = field(default=lambda drain: None, repr=False)
    _threads: ThreadPoolExecutor | None = field(default=None, repr=False)

    @property
    def info(self) -> ExecutorInfo:
        return self.client.info

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that can be served: the context window, or the whole KV cache if that is
        less."""
        info = self.info
        return min(info.max_model_len, info.num_blocks * info.block_size)

    async def in_text_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run slow text work (long prompts, chat templates) beside the event loop. A cancelled caller leaves
        at once; what has begun runs to its end, and what has not is dropped."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_TEXT_THREADS, thread_name_prefix="bridle-text")
        return await asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))

    def close(self, drain: float = 0.0) -> None:
        """End the engine; running requests get `drain` seconds to finish. Idempotent."""
        self.shutdown(drain)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def load_model(
    config: ModelConfig,
    engine_config: EngineConfig | None = None,
    *,
    name: str | None = None,
    progress: Callable[[str, float], None] | None = None,
    pools: Sequence[ControllerPool] = (),
    sampler: Sampler | None = None,
    control: Callable[[Path, ExecutorInfo], RuntimeConfig] | None = None,
) -> LoadedModel:
    """Find, load and start a model. `name` defaults to the folder's or the hub's name.

    `progress(what, share)` is called with a share between 0 and 1. `pools` bring further kinds of controllers, beside
    plain Python ones. `control` says how to start a runtime for Wasm controllers, given the tokenizer's folder and the
    model's facts (None: there is none). Raises `UnsupportedModel` or `InvalidRequest` with what to do about it.
    """
    from bridle.controllers import PythonControllerPool
    from bridle.engine import AsyncEngine, Engine
    from bridle.model import load_executor, resolve_model
    from bridle.text import Detokenizer, Tokenizer

    path = resolve_model(config.model, config.revision)
    tokenizer = Tokenizer.load(config.tokenizer or str(path), None if config.tokenizer is None else config.revision)
    executor = load_executor(config, progress=progress, sampler=sampler)
    runtime = _start_control(control, config, path, executor.info)
    engine = Engine(
        executor,
        engine_config or EngineConfig(),
        pools=(PythonControllerPool(executor.info.vocab_size), *pools, *((runtime,) if runtime else ())),
        decoder=Detokenizer(tokenizer),
    )
    client = AsyncEngine(engine)
    if runtime is not None:
        runtime.wake = client.wake
    client.start()
    return LoadedModel(name or model_name(config.model), client, tokenizer, control=runtime, shutdown=client.close)


def _start_control(
    control: Callable[[Path, ExecutorInfo], RuntimeConfig] | None, config: ModelConfig, path: Path, info: ExecutorInfo
) -> RuntimePool | None:
    """The runtime process of this model's vocabulary."""
    if control is None:
        return None
    from bridle.aici.client import RuntimePool
    from bridle.model import resolve_model

    folder = path if config.tokenizer is None else resolve_model(config.tokenizer, config.revision)
    return RuntimePool(control(folder, info), info.vocab_size)


def model_name(model: str) -> str:
    """The short name of what a configuration calls a model: a folder's last part, otherwise the id itself."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model
