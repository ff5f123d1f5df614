"""Runs several engines for one model, each in its own process: starts, watches and restarts them.

    model = load_replicated(ModelConfig("demo"), EngineConfig(), count=2)

The returned model is used like any other model. Each replica has its own copy of the weights. Replicas share the
machine's cores.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.cgroups import num_cores
from bridle.config import EngineConfig, ModelConfig
from bridle.controller_tools import ToolExecutor
from bridle.distributed.replica_messages import Handshake
from bridle.distributed.replica_tools import check_limits
from bridle.distributed.replicas import ReplicaSet
from bridle.distributed.tool_messages import ToolsElsewhere
from bridle.errors import InvalidRequest
from bridle.launch.launcher import FETCHED, START_SECONDS
from bridle.launch.replica_process import ReplicaConfig
from bridle.launch.sockets import make_socket_folder
from bridle.launch.supervised_process import SupervisedProcess
from bridle.load_progress import Report, silent, watched
from bridle.multimodal import ImageHosts, open_reader
from bridle.serving.controller_runtime import ControlSettings, ControlStart, finish_control, guess_num_logits
from bridle.serving.lora.adapter_registry import AdapterRegistry
from bridle.serving.lora.lora_config import unpack_source
from bridle.serving.models.engine_factory import load_vectors
from bridle.serving.models.loading import LoadedModel, model_name
from bridle.serving.models.model_components import begin_control_of, constraint_pool, load_tokenizer
from bridle.serving.models.model_memory import Needs
from bridle.serving.models.vocab_checks import check_sizes
from bridle.serving.requests.sampling_defaults import read_defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridle.aici.client import RuntimePool
    from bridle.structured_output import ConstraintPool
    from bridle.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class LaunchedReplicas(ReplicaSet):
    """A replica set that owns its processes. `commands` start the processes; each command also gets `--listen PATH
    --parent PID`. When a replica is restarted, its command also gets `--num-blocks COUNT`, so that it has the same
    number of KV blocks without measuring memory again."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        start_timeout: float = START_SECONDS,
        tools: ToolExecutor | None = None,
    ) -> None:
        self._folder = make_socket_folder()
        paths = [str(self._folder / f"replica-{number}.sock") for number in range(len(commands))]
        self._commands = [
            [*command, "--listen", path, "--parent", str(os.getpid())]
            for command, path in zip(commands, paths, strict=True)
        ]
        self.children = [
            SupervisedProcess(f"replica {number}", command) for number, command in enumerate(self._commands)
        ]
        self.start_timeout = start_timeout
        self._away_since: dict[int, float] = {}
        super().__init__(
            paths,
            on_loss=lambda number, pid: self.children[number].kill(pid),
            on_proven=lambda number, pid: self.children[number].prove(pid),
            tools=tools,
        )
        try:
            self.start(len(commands), start_timeout, lambda: not any(child.has_failed for child in self.children))
        except BaseException:
            self.close()
            raise
        for child in self.children:
            child.keep()

    def note_up(self, number: int, hello: Handshake) -> None:
        super().note_up(number, hello)
        self._away_since.pop(number, None)
        self.children[number].environment = FETCHED
        self.children[number].command = [*self._commands[number], "--num-blocks", str(hello.info.num_blocks)]

    def note_absent(self, number: int) -> None:
        """Record that a replica is not connected yet. A replica that does not start in time counts as hung, and is
        restarted."""
        super().note_absent(number)
        now = time.monotonic()
        if now - self._away_since.setdefault(number, now) > self.start_timeout:
            self._away_since[number] = now
            _log.error("replica %d has not started within %g s", number, self.start_timeout)
            self.children[number].kill()

    def close(self, drain: float = 0.0) -> None:
        super().close(drain)
        for child in self.children:
            child.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def load_replicated(
    config: ModelConfig,
    engine: EngineConfig,
    count: int,
    *,
    shards: int = 0,
    name: str | None = None,
    progress: Report | None = None,
    control: ControlSettings | None = None,
    tools: ToolExecutor | None = None,
) -> LoadedModel:
    """Load a model with `count` engines. Each engine has its own `shards` processes, if any. If `control` turns on Wasm
    controllers, each engine has its own control runtime. All engines share a store of controllers and the `tools` of
    this process, which the caller must close. Raises `ShardUnavailable` if a replica does not start."""
    from bridle.backends import check_backend
    from bridle.model import resolve_model
    from bridle.model.pooling.settings import read_pooling

    check_backend(config)
    if count < 1:
        raise InvalidRequest(f"replicas is {count}; must be at least 1", "replicas")
    report = progress or silent
    with watched(report):
        path = resolve_model(config.model, config.revision)
    pooling = read_pooling(path)
    tokenizer = _checked_tokenizer(config, path)
    offered = tools or ToolExecutor()
    steering = control if control is not None and pooling is None else ControlSettings("off")
    told = ReplicaConfig(_share(config, count), engine, shards, steering, _tools_elsewhere(offered))
    client, store = _start(told, count, path, report, offered)
    name = name or model_name(config.model)
    constraints = constraint_pool(tokenizer, client.info)
    return LoadedModel(
        name,
        client,
        tokenizer,
        adapters=AdapterRegistry(client.adapters, (name, config.model), partial(unpack_source, config)),
        control_vectors=client.control_vectors,
        control=store,
        constraints=constraints,
        pictures=open_reader(path, hosts=ImageHosts(config.image_hosts)),
        engine=engine,
        defaults=read_defaults(path, config.generation_config),
        pooling=pooling,
        tools=offered,
        shutdown=partial(_shut_down, client, constraints, store, None if tools else offered),
    )


def _checked_tokenizer(config: ModelConfig, path: Path) -> Tokenizer:
    """Load the tokenizer. Raises an error if the tokenizer has more tokens than the model has logits."""
    tokenizer = load_tokenizer(config, path)
    if (num_ids := guess_num_logits(path)) is not None:
        check_sizes(tokenizer, num_ids, config.model)
    return tokenizer


def _tools_elsewhere(tools: ToolExecutor) -> ToolsElsewhere:
    check_limits(tools.limits)
    return ToolsElsewhere(tools.names, tools.of_clients, tools.limits)


def _start(
    config: ReplicaConfig, count: int, path: Path, report: Report, tools: ToolExecutor
) -> tuple[LaunchedReplicas, RuntimePool | None]:
    """Start the replicas, and the store of their controllers. If a replica does not start, or if the start is
    cancelled, all replicas are closed again."""
    control = config.control
    with ExitStack() as undo:
        report(f"starting {count} replicas", 0.0)
        starting = begin_control_of(config.model, path, control)  # handles uploads and tags in this process
        if starting is not None:
            undo.callback(starting.abandon)
        config.control = _own_control(control, starting)
        vectors = config.model.control_vectors  # the replicas get them from this process
        config.model = replace(config.model, control_vectors=())
        command = [sys.executable, "-m", "bridle.launch.replica_process", "--config", config.encode()]
        client = LaunchedReplicas([command] * count, tools=tools)
        undo.callback(client.close)
        load_vectors(client, vectors)
        store = finish_control(control, starting, client.info.vocab_size)
        if store is not None:
            undo.callback(store.shutdown)
            store.is_store = True
        report("ready", 1.0)
        undo.pop_all()
    return client, store


def _shut_down(
    client: LaunchedReplicas,
    constraints: ConstraintPool,
    store: RuntimePool | None,
    tools: ToolExecutor | None,
    drain: float = 0.0,
) -> None:
    """Close the replicas and their resources in this process."""
    client.close(drain)
    constraints.shutdown()
    if tools is not None:
        tools.close()
    if store is not None:
        store.shutdown()


def _own_control(control: ControlSettings, store: ControlStart | None) -> ControlSettings:
    """Return the control settings of each replica. Either all replicas or none have a control runtime, so that no
    replica refuses requests that others accept."""
    if store is None:
        return replace(control, mode="off")
    return replace(control, mode="on", prepare=False)


def _share(config: ModelConfig, count: int) -> ModelConfig:
    """Return one replica's share of the machine. Memory is divided between the replicas. Cores are divided too, unless
    the number of threads is set."""
    threads = config.num_threads or max(num_cores() // count, 1)
    bound = None if config.max_kv_memory is None else max(config.max_kv_memory // count, 1)
    return replace(config, num_threads=threads, num_sharers=count, max_kv_memory=bound)


class ReplicaLoader:
    """A `ModelLoader` that loads each model as `count` replicas."""

    def __init__(
        self, count: int, shards: int, engine: EngineConfig, control: ControlSettings, tools: ToolExecutor | None = None
    ) -> None:
        if control.trace is not None:
            raise InvalidRequest(
                "aici_trace records one control runtime, but each replica has its own; set replicas to 1", "aici_trace"
            )
        self._count = count
        self._shards = shards
        self._engine = engine
        self._control = control
        self._tools = tools

    def measure(self, config: ModelConfig, name: str) -> Needs:
        from bridle.backends import check_backend
        from bridle.model.memory_estimate import weights_of

        check_backend(config)
        return Needs(self._count * weights_of(config), self._count * (config.reserved_memory or 0))

    def make_room(self, config: ModelConfig) -> ModelConfig:
        from bridle.model.memory_estimate import settle_adapters

        config, self._engine = settle_adapters(config, self._engine, self._count)
        return config

    def load(self, config: ModelConfig, name: str, progress: Report) -> LoadedModel:
        return load_replicated(
            config,
            self._engine,
            self._count,
            shards=self._shards,
            name=name,
            progress=progress,
            control=self._control,
            tools=self._tools,
        )
