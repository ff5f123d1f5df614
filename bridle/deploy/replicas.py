"""Several engines for one model, each in a process of its own: started, watched, started again.

    model = load_replicated(ModelConfig("demo"), EngineConfig(), count=2)

The model that comes out is used like any other. Its replicas need a weight copy each, and share the machine's cores.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.cluster.replicas import ReplicaSet
from bridle.config import EngineConfig, ModelConfig
from bridle.deploy.child import Child
from bridle.deploy.launcher import START_SECONDS
from bridle.deploy.replica_process import ReplicaConfig
from bridle.deploy.sockets import make_socket_folder
from bridle.errors import InvalidRequest
from bridle.service.adapters import AdapterRegistry
from bridle.service.control import ControlSettings, ControlStart, begin_control, finish_control, guess_num_logits
from bridle.service.loading import LoadedModel, model_name

if TYPE_CHECKING:
    from collections.abc import Sequence


class LaunchedReplicas(ReplicaSet):
    """A replica set that owns its processes. `commands` start them; each is given `--listen PATH --parent PID` too."""

    def __init__(self, commands: Sequence[Sequence[str]], *, start_timeout: float = START_SECONDS) -> None:
        self._folder = make_socket_folder()
        paths = [str(self._folder / f"replica-{number}.sock") for number in range(len(commands))]
        self.children = [
            Child(f"replica {number}", [*command, "--listen", path, "--parent", str(os.getpid())])
            for number, (command, path) in enumerate(zip(commands, paths, strict=True))
        ]
        super().__init__(
            paths,
            on_loss=lambda number, pid: self.children[number].kill(pid),
            on_proven=lambda number, pid: self.children[number].prove(pid),
        )
        try:
            self.start(len(commands), start_timeout, lambda: not any(child.has_failed for child in self.children))
        except BaseException:
            self.close()
            raise
        for child in self.children:
            child.keep()

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
    progress: Callable[[str, float], None] | None = None,
    control: ControlSettings | None = None,
) -> LoadedModel:
    """A model with `count` engines, each over `shards` processes of its own if there are any, and with a runtime of its
    own for Wasm controllers if `control` wants one; all of them share a store of controllers. Raises `ShardUnavailable`
    if a replica does not start."""
    from bridle.constraints import ConstraintPool, vocabulary_of
    from bridle.model import resolve_model
    from bridle.text import Tokenizer

    if count < 1:
        raise InvalidRequest(f"replicas is {count}; must be at least 1", "replicas")
    path = resolve_model(config.model, config.revision)
    tokenizer = Tokenizer.load(config.tokenizer or str(path), config.revision if config.tokenizer else None)
    if progress is not None:
        progress(f"starting {count} replicas", 0.0)
    with ExitStack() as undo:
        control = control or ControlSettings("off")
        store = _begin_store(control, config, path)
        if store is not None:
            undo.callback(store.abandon)
        told = ReplicaConfig(_share(config, count), engine, shards, _own_control(control, store)).encode()
        command = [sys.executable, "-m", "bridle.deploy.replica_process", "--config", told]
        client = LaunchedReplicas([command] * count)
        undo.callback(client.close)
        info = client.info
        runtime = finish_control(control, store, info.vocab_size)
        undo.pop_all()
    constraints = ConstraintPool(lambda: vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids))

    def shut_down(drain: float) -> None:
        client.close(drain)
        constraints.shutdown()
        if runtime is not None:
            runtime.shutdown()

    if runtime is not None:
        runtime.is_store = True
    if progress is not None:
        progress("ready", 1.0)
    name = name or model_name(config.model)
    return LoadedModel(
        name,
        client,
        tokenizer,
        adapters=AdapterRegistry(client.adapters, (name, config.model)),
        control=runtime,
        constraints=constraints,
        engine=engine,
        shutdown=shut_down,
    )


def _begin_store(control: ControlSettings, config: ModelConfig, path: Path) -> ControlStart | None:
    """The runtime of this process, on its way: it takes uploads and tags, and prepares what comes with bridle."""
    if control.mode == "off":
        return None
    from bridle.model import resolve_model

    folder = path if config.tokenizer is None else resolve_model(config.tokenizer, config.revision)
    return begin_control(control, folder, guess_num_logits(path))


def _own_control(control: ControlSettings, store: ControlStart | None) -> ControlSettings:
    """What each replica is told. One without a runtime where the others have one would refuse what they take."""
    if store is None:
        return ControlSettings("off")
    return replace(control, mode="on", prepare=False)


def _share(config: ModelConfig, count: int) -> ModelConfig:
    """One replica's part of the machine: memory is divided, and so are cores unless threads are given."""
    threads = config.num_threads or max((os.cpu_count() or 1) // count, 1)
    return replace(config, num_threads=threads, num_sharers=count)


class ReplicaLoader:
    """Loads models as `count` replicas each; a `ModelLoader`."""

    def __init__(self, count: int, shards: int, engine: EngineConfig, control: ControlSettings) -> None:
        if control.trace is not None:
            raise InvalidRequest(
                "aici_trace records one control runtime, and each replica has its own; use one replica", "aici_trace"
            )
        self._count = count
        self._shards = shards
        self._engine = engine
        self._control = control

    def measure(self, config: ModelConfig) -> int:
        from bridle.model.footprint import weights_of

        return self._count * weights_of(config)

    def load(self, config: ModelConfig, name: str, progress: Callable[[str, float], None]) -> LoadedModel:
        return load_replicated(
            config,
            self._engine,
            self._count,
            shards=self._shards,
            name=name,
            progress=progress,
            control=self._control,
        )
