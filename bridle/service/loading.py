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
from bridle.service.control import ControlSettings, ControlStart, begin_control, finish_control, guess_num_logits

if TYPE_CHECKING:
    from bridle.aici.client import RuntimePool
    from bridle.constraints import Constraint, ConstraintPool
    from bridle.engine.client import EngineClient
    from bridle.engine.interfaces import ControllerPool, ExecutorInfo, Sampler
    from bridle.text import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

_NUM_TEXT_THREADS = 2


@dataclass(slots=True)
class LoadedModel:
    """A model that takes requests. `created` is a Unix time in seconds; `adapters` are the names it can
    apply, `control` is the runtime of its Wasm controllers, `constraints` compiles constraints for it."""

    name: str
    client: EngineClient
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: frozenset[str] = frozenset()
    control: RuntimePool | None = None
    constraints: ConstraintPool | None = None
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

    async def try_constraint(self, constraint: Constraint) -> None:
        """Compile a constraint before a request needs it. Raises `InvalidRequest` for one that cannot be used."""
        if self.constraints is not None:
            compiling = self.constraints.compiler.compile(constraint)
            await asyncio.shield(asyncio.wrap_future(compiling))  # others may wait for the same one

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
    control: ControlSettings | None = None,
) -> LoadedModel:
    """Find, load and start a model. `name` defaults to the folder's or the hub's name.

    `progress(what, share)` is called with a share between 0 and 1. `pools` bring further kinds of controllers, beside
    plain Python ones and constraints. `control` says whether Wasm controllers get a runtime (None: no); it starts
    while the model is loaded. Raises `UnsupportedModel` or `InvalidRequest` with what to do about it.
    """
    from bridle.constraints import ConstraintPool, vocabulary_of
    from bridle.controllers import PythonControllerPool
    from bridle.engine import AsyncEngine, Engine
    from bridle.model import load_executor, resolve_model
    from bridle.text import Detokenizer, Tokenizer

    path = resolve_model(config.model, config.revision)
    control = control or ControlSettings("off")
    starting = _begin_control(control, config, path)
    try:
        tokenizer = Tokenizer.load(config.tokenizer or str(path), config.revision if config.tokenizer else None)
        executor = load_executor(config, progress=progress, sampler=sampler)
    except BaseException:
        if starting is not None:
            starting.abandon()
        raise
    try:
        runtime = finish_control(control, starting, executor.info.vocab_size)
    except BaseException:
        executor.close()
        raise
    vocab_size = executor.info.vocab_size
    constraints = ConstraintPool(lambda: vocabulary_of(tokenizer, vocab_size, executor.info.eos_token_ids))
    engine = Engine(
        executor,
        engine_config or EngineConfig(),
        pools=(PythonControllerPool(vocab_size), constraints, *pools, *((runtime,) if runtime else ())),
        decoder=Detokenizer(tokenizer),
    )
    client = AsyncEngine(engine)
    if runtime is not None:
        runtime.wake = client.wake
    client.start()
    return LoadedModel(
        name or model_name(config.model),
        client,
        tokenizer,
        control=runtime,
        constraints=constraints,
        shutdown=client.close,
    )


def _begin_control(control: ControlSettings, config: ModelConfig, path: Path) -> ControlStart | None:
    """The runtime of this model's vocabulary, on its way."""
    if control.mode == "off":
        return None
    from bridle.model import resolve_model

    folder = path if config.tokenizer is None else resolve_model(config.tokenizer, config.revision)
    return begin_control(control, folder, guess_num_logits(path))


def model_name(model: str) -> str:
    """The short name of what a configuration calls a model: a folder's last part, otherwise the id itself."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model
