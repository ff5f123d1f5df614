"""Loads a model by its name: checkpoint, tokenizer, engine, and the engine's thread.

`load_model` imports the heavy libraries (torch, transformers) itself. So other modules of the server can be imported
and tested without torch and transformers.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from bridle.config import EngineConfig, ModelConfig
from bridle.controller_tools import Desk, ToolExecutor
from bridle.engine.interfaces import Sampler
from bridle.engine.scheduling.batching import Batching
from bridle.errors import BridleError, EngineClosed, Overloaded, UnsupportedFeature
from bridle.load_progress import Report
from bridle.lora import AdapterPool
from bridle.multimodal import MediaReader
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.lora.adapter_registry import AdapterRegistry
from bridle.serving.lora.lora_config import unpack_source
from bridle.serving.models.early_parts import EarlyParts
from bridle.serving.models.engine_factory import ExecutorLoader, load_parts, make_adapters, start_engine
from bridle.serving.outputs.tool_call_token_cache import ToolCallTokenCache
from bridle.serving.tenancy.loop_pace import LoopPace
from bridle.threads import start_thread

if TYPE_CHECKING:
    from bridle.aici.client import PolicyPool, RuntimePool
    from bridle.control_vectors import ControlVectors
    from bridle.engine import AsyncEngine
    from bridle.engine.client import EngineClient
    from bridle.engine.interfaces import ControllerPool, ExecutorInfo
    from bridle.model.pooling.settings import Pooling
    from bridle.serving.policies import Applied, PolicySet
    from bridle.structured_output import Constraint, ConstraintPool
    from bridle.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

_NUM_TEXT_THREADS = 2
#: Maximum number of requests that fetch images from other servers at once.
_MOST_FETCHING = 32
#: Maximum average number of characters per token of any tokenizer in use. Longer texts are refused without being
#: tokenized.
MAX_CHARS_PER_TOKEN = 128


@dataclass(slots=True)
class LoadedModel:
    """A loaded model that accepts requests.

    `created` is a Unix time in seconds. `adapters` are the model's registered adapters. `control` is the runtime of the
    model's Wasm controllers. `constraints` compiles constraints for the model. `num_bytes` is the memory for the
    model's weights, KV cache and adapters, in bytes; 0 if unknown. `engine` has the configured limits of the engine.
    `batching` has the settings of continuous batching that follow from the engine's limits. `max_sequence_tokens` is
    the longest sequence that can be served: the context length, or the whole KV cache if that is smaller. A prompt has
    at most `max_prompt_chars` characters.
    """

    name: str
    client: EngineClient
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    adapter_pool: AdapterPool | None = None  # pool of the engine in this process
    control_vectors: ControlVectors | None = None  # None: the backend applies none
    control: RuntimePool | None = None
    constraints: ConstraintPool | None = None
    pictures: MediaReader | None = None  # None: the model reads only text
    num_bytes: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)
    pid: int = field(default_factory=os.getpid)  # the process that loaded it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling defaults that the checkpoint recommends
    pooling: Pooling | None = None  # how the model makes vectors or labels of texts, if that is its task
    tools: ToolExecutor | None = None  # tools that controllers may call
    demanded: PolicyPool | None = None  # runs Wasm modules of policies
    chat_format: dict[str, Any] | None = None  # how the model writes tool calls and reasoning, once known
    policies: PolicySet | None = None  # policies for all requests that do not come through a server
    shutdown: Callable[[float], None] = field(default=lambda drain: None, repr=False)
    pace: LoopPace = field(default_factory=LoopPace, repr=False)  # of tasks that write streams
    has_embedded: bool = field(default=False, init=False, repr=False)  # the warning is logged once
    info: ExecutorInfo = field(init=False, repr=False)
    batching: Batching = field(init=False, repr=False)
    max_sequence_tokens: int = field(init=False, repr=False)
    max_prompt_chars: int = field(init=False, repr=False)
    answers: ToolCallTokenCache = field(init=False, repr=False)
    _threads: ThreadPoolExecutor | None = field(default=None, repr=False)
    _fetching: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MOST_FETCHING), repr=False)

    def __post_init__(self) -> None:
        info = self.info = self.client.info
        self.adapters.add_base_names((self.name,))
        self.answers = ToolCallTokenCache(self.engine.park_seconds if self._parks else 0.0)
        self.batching = Batching.of(self.engine, info)
        self.max_sequence_tokens = min(info.max_model_len, info.num_blocks * info.block_size)
        if self.pictures is not None:
            self.pictures.fit(self.max_sequence_tokens)
        self.max_prompt_chars = self.max_sequence_tokens * MAX_CHARS_PER_TOKEN

    @property
    def is_paused(self) -> bool:
        """Return whether the model is paused."""
        return bool(getattr(self.client, "is_paused", False))

    def pause(self, *, cancels: bool = False) -> None:
        """Pause the engine: it computes nothing until `resume`. With `cancels`, all current requests are cancelled.
        Raises `UnsupportedFeature` for a model in other processes."""
        self._pausable().pause(cancels=cancels)

    def resume(self) -> None:
        """Continue after `pause`. Raises `UnsupportedFeature` for a model in other processes."""
        self._pausable().resume()

    def _pausable(self) -> AsyncEngine:
        if not hasattr(self.client, "pause"):
            raise UnsupportedFeature(
                f"pause: {self.name!r} runs in replicas, which cannot be paused. Serve the model without --replicas.",
                "model",
            )
        return cast("AsyncEngine", self.client)

    def require_control_vectors(self) -> ControlVectors:
        """Return the control vectors of the model. Raises `UnsupportedFeature` if no control vector can be loaded into
        this model after its start."""
        if self.control_vectors is None:
            raise UnsupportedFeature(
                f"control_vectors: {self.name!r} accepts no control vectors at run time. Load them at startup, with "
                "the torch backend and without shards.",
                "control_vectors",
            )
        return self.control_vectors

    @property
    def modalities(self) -> tuple[str, ...]:
        """Return the kinds of media that the model reads in addition to text."""
        return () if self.pictures is None else tuple(self.pictures.senses)

    @property
    def local_engine(self) -> AsyncEngine | None:
        """Return the engine if it runs on a thread of this process; else None."""
        from bridle.engine import AsyncEngine

        return self.client if isinstance(self.client, AsyncEngine) else None

    @property
    def policy_control(self) -> RuntimePool | None:
        """Return the runtime that runs the Wasm modules of policies, or None if no policy has needed it yet."""
        return None if self.demanded is None else self.demanded.runtime

    @property
    def _parks(self) -> bool:
        """Return whether the KV of a request may be retained after the request's end."""
        return self.engine.enable_prefix_caching and self.engine.park_memory != 0 and self.info.kv == "paged"

    def demands(self, adapter: str | None = None, user: str = "") -> Applied:
        """Return the policies for a request that comes from this process and not through a server."""
        from bridle.serving.policies import NO_POLICIES, PolicyContext
        from bridle.serving.tenancy.keys import LOCAL_USER

        if self.policies is None:
            return NO_POLICIES
        return self.policies.select(PolicyContext(self.name, adapter, user or LOCAL_USER.user), self)

    def check_process(self) -> None:
        """Raise `EngineClosed` in a fork of the process that loaded the model, because its threads do not run in the
        fork."""
        from bridle.engine.async_engine import FORKED

        if os.getpid() != self.pid:
            raise EngineClosed(FORKED)

    async def in_text_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run slow text work (long prompts, chat templates) in a thread, so that the event loop continues. If the
        caller is cancelled, the call returns at once. Text work that has begun runs to its end; text work that has not
        begun is dropped."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_TEXT_THREADS, thread_name_prefix="bridle-text")
        return await asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))

    async def in_fetching_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work like `in_text_thread`, for a request whose images must be fetched. The request gets a separate
        thread, because fetching waits for other servers. Raises `Overloaded` if too many requests fetch images."""
        if self.pictures is None or not self.pictures.hosts:  # images of this model are never fetched
            return await self.in_text_thread(function, *args, **kwargs)
        if not self._fetching.acquire(blocking=False):
            raise Overloaded(f"{_MOST_FETCHING} requests are fetching images, which is the limit; try again later")
        fetching = start_thread(partial(function, *args, **kwargs), "bridle-fetch")
        fetching.add_done_callback(lambda done: self._fetching.release())
        return await asyncio.wrap_future(fetching)

    async def try_constraint(self, constraint: Constraint) -> None:
        """Compile a constraint before a request needs it. Raises `InvalidRequest` for an unusable constraint."""
        if self.constraints is not None:
            compiling = self.constraints.compiler.compile(constraint)
            await asyncio.shield(asyncio.wrap_future(compiling))  # other requests may wait for the same constraint

    def abandon(self, error: BridleError) -> None:
        """Fail all requests, because the engine hangs in a step. The model's memory is freed when this step ends."""
        if self.local_engine is not None:
            self.local_engine.abandon(error)
        for pool in (self.control, self.demanded):
            if pool is not None:
                pool.shutdown()  # so that no process is left that only the hanging thread would end

    def close(self, drain: float = 0.0) -> None:
        """Close the engine. Running requests get `drain` seconds to finish. Idempotent."""
        self.shutdown(drain)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def load_model(
    config: ModelConfig,
    engine_config: EngineConfig | None = None,
    *,
    name: str | None = None,
    progress: Report | None = None,
    pools: Sequence[ControllerPool] = (),
    sampler: Sampler | None = None,
    control: ControlSettings | None = None,
    executors: ExecutorLoader | None = None,
    tools: Desk | None = None,
    early: EarlyParts | None = None,
) -> LoadedModel:
    """Find, load and start a model. By default, `name` is the name of the folder or the hub id.

    `progress(what, share)` is called with a share between 0 and 1. If `progress` raises an error, the loading ends.
    `pools` run further kinds of controllers, in addition to Python controllers and constraints. `control` has the
    settings of the runtime for Wasm controllers (None: no runtime). The control runtime starts while the model is
    loaded. `executors`, if given, loads the model outside of this process. Controllers may call the `tools`, which the
    caller must close, and the tools of clients. `early` has parts of the model that are already prepared; the model
    owns them from now on. Raises `UnsupportedModel` or `InvalidRequest`; the message names the next step.
    """
    engine_config = engine_config or EngineConfig()
    config = config.sized_for(engine_config)
    parts = load_parts(config, control or ControlSettings("off"), progress, sampler, executors, early)
    adapters = make_adapters(parts.executor, engine_config)
    own = None
    if tools is None:
        tools = own = ToolExecutor()
    client, constraints = start_engine(parts, engine_config, pools, adapters, tools)
    name = name or model_name(config.model)
    return LoadedModel(
        name,
        client,
        parts.tokenizer,
        adapters=AdapterRegistry(adapters, (name, config.model), partial(unpack_source, config)),
        adapter_pool=adapters,
        control_vectors=parts.control_vectors,
        control=parts.runtime,
        demanded=parts.demanded,
        constraints=constraints,
        pictures=parts.pictures,
        num_bytes=parts.executor.num_bytes + (config.reserved_memory or 0),
        engine=engine_config,
        defaults=parts.defaults,
        pooling=parts.pooling,
        tools=tools if isinstance(tools, ToolExecutor) else None,
        shutdown=partial(_close_both, client, tools, own),
    )


def _close_both(client: AsyncEngine, desk: Desk, own: ToolExecutor | None, drain: float = 0.0) -> None:
    """Close an engine, and then the tools that belong to it (`own`). The tools in `desk` are shared, so they are not
    closed; these tools only forget the engine."""
    try:
        client.close(drain)
    finally:
        if isinstance(desk, ToolExecutor):
            desk.unwatch(client.wake)
        if own is not None:
            own.close()


def model_name(model: str) -> str:
    """Return the short name of a model: the last part of a folder, a GGUF file's name without `.gguf`, or else the id
    itself."""
    folder = Path(model)
    if model.lower().endswith(".gguf") and folder.is_file():
        return folder.stem
    return folder.resolve().name if folder.is_dir() else model
