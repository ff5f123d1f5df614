"""`bridle serve`: serves models over HTTP and LMTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from bridle.cli.access_options import AccessOptions
from bridle.cli.adapter_options import AdapterOptions
from bridle.cli.control_options import ControlOptions, ToolOptions
from bridle.cli.limit_options import LimitOptions
from bridle.cli.model_files import default_model
from bridle.cli.options import Bytes, EngineOptions, ModelOptions
from bridle.cli.preflight import check_address, check_models
from bridle.cli.signals import ending_at_once
from bridle.cli.speculation_options import SpeculationOptions
from bridle.cli.units import count
from bridle.compat.cli_flags import spellings
from bridle.errors import InvalidRequest
from bridle.logs import LogFormat

if TYPE_CHECKING:
    from bridle.config import EngineConfig
    from bridle.distributed.address import Tls
    from bridle.http.settings import ServeSettings
    from bridle.serving.models.served_models import ModelSet

_SERVER = Group("Server", sort_key=5)
_PROCESSES = Group("Processes", sort_key=8)
_MODELS = Group("Models on demand", sort_key=11)


@Parameter(name="*", group=_PROCESSES)
@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options for running the model in processes other than the server."""

    isolate_model: Annotated[bool, Parameter(negative="")] = False
    "Run each model in its own process. If the process ends, it is restarted and its requests continue."
    shards: int = 0
    "Number of processes that compute a model together (tensor parallelism). 1 is the same as `--isolate-model`."
    spare: bool = True
    "Keep a spare process for `--isolate-model`, so that a restart is faster."
    replicas: int = 1
    "Number of engines for each model, each in its own process with its own weights."
    front_ends: int = 1
    "Number of processes that write streams to clients, including the server's own process. Not supported with TLS."
    shard: str | None = None
    "Address of a running `bridle shard` that computes the model: `host:port` or `unix:/path`."
    shard_ca: Path | None = None
    "PEM file with the CA of the shard's certificate."
    shard_cert: Path | None = None
    "PEM file with the client certificate for the shard."
    shard_key: Path | None = None
    "PEM file with the private key of the client certificate."

    def add_to(self, settings: ServeSettings) -> ServeSettings:
        """Return the settings of a server with the model loader that these options require."""
        self._check()
        settings = replace(settings, front_ends=self.front_ends)
        num_shards = self.shards or int(self.isolate_model)
        if self.replicas > 1:
            from bridle.launch.replicas import ReplicaLoader

            return replace(settings, make_loader=partial(ReplicaLoader, self.replicas, num_shards))
        if not (self.shard or num_shards):
            return settings
        from bridle.launch.launcher import connect_shard, launch_shard
        from bridle.serving.models.served_models import EngineLoader

        launch = partial(launch_shard, shards=num_shards, stands_by=self.spare)
        executors = launch if self.shard is None else connect_shard(self.shard, self._tls())
        return replace(settings, make_loader=partial(EngineLoader, executors=executors))

    def _check(self) -> None:
        if self.shards < 0:
            raise InvalidRequest(f"shards is {self.shards}; must be at least 0", "shards")
        if self.replicas < 1:
            raise InvalidRequest(f"replicas is {self.replicas}; must be at least 1", "replicas")
        if self.shard is not None and (self.isolate_model or self.shards or self.replicas > 1):
            raise InvalidRequest(
                "shard cannot be combined with isolate_model, shards or replicas, because that shard runs already",
                "shard",
            )

    def _tls(self) -> Tls | None:
        from bridle.distributed.address import Tls, check_address

        check_address(self.shard or "")
        return Tls(self.shard_cert, self.shard_key, self.shard_ca) if self.shard_ca or self.shard_cert else None


@Parameter(name="*", group=_MODELS)
@dataclass(frozen=True, kw_only=True)
class ModelSetOptions:
    """Options for models that may be loaded in addition to the models on the command line."""

    model_alias: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Additional name for a model, NAME=MODEL. The model is loaded at the first request. Repeatable."
    models_dir: Path | None = None
    "Folder of models and GGUF files that requests may load by name."
    allow_hub: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Hub id of a model that requests may load by name. Repeatable."
    allow_pull: bool | None = None
    """Let requests load the models that `bridle pull` lists, and admins pull and delete them through Ollama's API.
    Default: yes if no MODEL is named."""
    static: Annotated[bool, Parameter(negative="")] = False
    "Keep the models of the command line loaded, and load no others."
    max_model_memory: Bytes = None
    """Maximum memory for all models with their KV caches and adapters, such as `24GiB`. Default: most of the free
    memory."""
    load_timeout: float = 300.0
    "Seconds that a request waits for its model to load."

    def to_set(self, models: tuple[str, ...]) -> ModelSet:
        from bridle.serving.models.served_models import ModelSet

        return ModelSet(
            models=models,
            aliases=tuple(_alias(text) for text in self.model_alias),
            models_dir=self.models_dir,
            allow_hub=self.allow_hub,
            allow_pull=bool(self.allow_pull),
            is_static=self.static,
            max_memory=self.max_model_memory,
        )


def _alias(text: str) -> tuple[str, str]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise InvalidRequest(f"model_alias is {text!r}; must be NAME=MODEL", "model_alias")
    return name, model


@Parameter(name="*", group=_SERVER)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options for the address and the behaviour of the server."""

    host: str = "127.0.0.1"
    "Address to listen on; 0.0.0.0 makes the server reachable from other machines."
    port: int = 8080
    "Port to listen on; 0 takes a free one."
    served_name: str | None = None
    "Name of the model in requests. Default: the name of the folder or hub id."
    alias: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Additional name of the first model. Repeatable."
    max_requests: Annotated[int, Parameter(name=spellings("--max-requests"), converter=count)] = 512
    "Maximum number of requests in flight, queued or running. Further requests get status 429."
    request_timeout: float | None = None
    "Maximum seconds that one generation may take. Default: no limit."
    grace_period: float = 30.0
    "Maximum seconds for running requests to finish after Ctrl-C or SIGTERM."
    drain_parked: Literal["end", "wait"] = "end"
    """Conversations that wait for a tool's result at shutdown: `end` drops them; `wait` answers their next request
    within the grace period."""
    lmtp_path: str = "/lmtp"
    "Path of the LMTP WebSocket, in addition to `/`."
    log_format: LogFormat = "auto"
    """Form of log lines: `console` has five fields per request, `full` has all fields, `json` is for programs. `auto`
    is `console` on a terminal, else `json`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    "Lowest level to log."
    otlp_endpoint: str | None = None
    "OpenTelemetry collector for traces, such as `http://localhost:4318`. The `OTEL_*` variables work, too."
    trace_folder: Path | None = None
    "Folder for traces of outputs, up to 1 GiB. They contain prompts and outputs."
    trace_share: float = 0.0
    "Fraction of requests whose traces `--trace-folder` gets, from 0 to 1."
    state_db: Path | None = None
    """File that keeps stored responses, conversations, batches, traces for clients and prompt caches across restarts.
    It contains prompts and outputs. Default: they are kept in memory."""
    policies: Path | None = None
    """TOML file of policies that every output must follow. The server reads it again on SIGHUP and on `POST
    /v1/policies/reload`."""

    def to_settings(
        self,
        names: tuple[str, ...],
        model: ModelOptions,
        models: ModelSetOptions,
        engine: EngineOptions,
        access: AccessOptions,
        control: ControlOptions,
    ) -> ServeSettings:
        from bridle.controllers.plugins import load_classes
        from bridle.http.settings import HttpSettings, ServeSettings
        from bridle.serving.policies import PolicyRegistry

        http = HttpSettings(
            max_requests=self.max_requests,
            request_timeout=self.request_timeout,
            load_timeout=models.load_timeout,
            cors_origins=access.cors_origin,
            trusted_proxies=access.trusted_proxy,
            allowed_hosts=access.allowed_host or None,
            trace_folder=self.trace_folder,
            trace_share=self.trace_share,
            state_db=self.state_db,
            controller_classes=load_classes(control.controller_class),
            policies=None if self.policies is None else PolicyRegistry(self.policies),
        )
        return ServeSettings(
            model=model.to_config(names[0], warm_up=engine.warm_up),
            models=models.to_set(names),
            engine=_with_store(engine.to_config(), access),
            http=http,
            host=self.host,
            port=self.port,
            name=self.served_name,
            aliases=self.alias,
            grace_period=self.grace_period,
            drain_parked=self.drain_parked,
            log_format=self.log_format,
            log_level=self.log_level,
            control=control.to_settings(),
            keys=access.keys,
            no_auth=access.no_auth,
            tls=access.tls(),
            otlp_endpoint=self.otlp_endpoint,
        )


def serve(
    *names: Annotated[str, Parameter(name="MODEL")],
    server: ServerOptions = ServerOptions(),
    model: ModelOptions = ModelOptions(),
    models: ModelSetOptions = ModelSetOptions(),
    engine: EngineOptions = EngineOptions(),
    access: AccessOptions = AccessOptions(),
    control: ControlOptions = ControlOptions(),
    shards: ShardOptions = ShardOptions(),
    adapters: AdapterOptions = AdapterOptions(),
    limits: LimitOptions = LimitOptions(),
    speculation: SpeculationOptions = SpeculationOptions(),
    tools: ToolOptions = ToolOptions(),
) -> int:
    """Serve models over HTTP and LMTP.

    The server has the APIs of OpenAI, Anthropic, Ollama, text-generation-inference and AICI. `bridle serve` serves
    SmolLM2-135M-Instruct, downloaded once, on http://127.0.0.1:8080. `bridle serve Qwen/Qwen3-0.6B --port 9000` serves
    another model on another port. `bridle serve auto --models-dir ~/models` serves any model in that folder.

    Parameters
    ----------
    names
        Models to load at startup: folders, hub ids, names that `bridle pull` lists, or `demo`; `auto` loads none.
        Default: smollm2.
    """
    check_address(server.host, server.port)
    model.check_backend(names[0] if names else "demo")
    check_models(*(name for name in names if name != "auto"), revision=model.revision)
    check_models(model.draft_model, model.tokenizer)
    _begin_early(names, model.backend)
    if not names and models.allow_pull is None:
        models = replace(models, allow_pull=not models.static)
    settings = server.to_settings(names or ("demo",), model, models, engine, access, control)
    settings = speculation.add_to(limits.add_to(adapters.add_to(shards.add_to(settings))))
    settings = tools.add_to(settings)
    if not names:  # last, so that a mistake in a flag is reported before a download
        settings = _with_model(settings, default_model())
    with ending_at_once():  # until the server itself handles signals
        from bridle.http.server.run import serve as serve_http
        from bridle.lmtp.server import LmtpSettings, websocket_front

        lmtp = LmtpSettings(
            path=server.lmtp_path,
            load_timeout=models.load_timeout,
            request_timeout=server.request_timeout,
            allowed_origins=access.cors_origin,
        )
        serve_http(settings, fronts=[websocket_front(lmtp)])
    return 0


def _begin_early(names: Sequence[str], backend: str) -> None:
    """Prepare the files of the first model, before the libraries of the server are imported."""
    from bridle.early_start import begin_unpacking, preload_torch

    if backend != "llamacpp":
        preload_torch()
    if names and names[0].lower().endswith(".gguf"):
        begin_unpacking(Path(names[0]).expanduser())


def _with_store(engine: EngineConfig, access: AccessOptions) -> EngineConfig:
    """Return the settings, with a KV store if `kv_store` is not set and all requests are from one user."""
    is_shared = access.keys is not None or access.trusted_proxy
    return engine if engine.kv_store is not None or is_shared else replace(engine, kv_store="auto")


def _with_model(settings: ServeSettings, name: str) -> ServeSettings:
    """Return the settings with `name` as the only model."""
    models = None if settings.models is None else replace(settings.models, models=(name,))
    return replace(settings, model=replace(settings.model, model=name), models=models)
