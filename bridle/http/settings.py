"""Settings of the HTTP server, as plain validated values. The command line and tests create the settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Literal

from bridle.chat.system_blocks import DROPPED, NONE
from bridle.config import EngineConfig, ModelConfig
from bridle.controller_tools import ToolExecutor
from bridle.controllers.python import Controller
from bridle.errors import InvalidRequest
from bridle.http.middleware.trusted_hosts import AllowedHosts
from bridle.http.server.listening import check_port
from bridle.http.server.tls import TlsFiles
from bridle.logs import LogFormat
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.lora.lora_config import AdapterSet
from bridle.serving.models.engine_supervisor import RestartPolicy
from bridle.serving.models.model_loader import ModelLoader
from bridle.serving.models.served_models import EngineLoader, ModelSet
from bridle.serving.policies import PolicyRegistry
from bridle.telemetry import check_endpoint

_COUNTS = (
    "max_body_bytes",
    "max_requests",
    "max_prompt_tokens",
    "max_prompts",
    "max_choices",
    "max_uploads",
    "default_max_tokens",
)


#: The maximum number of front-end processes; one server could not feed more.
MAX_FRONT_ENDS = 64
#: The default limit of a request body: for text, and for models that read images.
BODY_BYTES, SEEING_BODY_BYTES = 4 << 20, 32 << 20


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of one HTTP application, mostly limits. Sizes are in bytes, times in seconds.

    A request body has at most `max_body_bytes`. If `max_body_bytes` is None, the maximum is `BODY_BYTES`, or
    `SEEING_BODY_BYTES` if a model reads images.

    `max_requests` and `max_prompt_tokens` limit all waiting and running requests together; further requests get a 429.
    One prompt that fits the model is always accepted. `max_prompts` and `max_choices` limit one request. `max_uploads`
    limits concurrent uploads of controllers. `request_timeout` limits a generation (None: no limit). `load_timeout`
    limits the wait for a model. `send_timeout` limits how long a client may pause reading. `receive_timeout` limits how
    long sending a body may take. `ping_interval` is the time after which an idle stream gets a ping, so that proxies
    keep it open. `cors_origins` are the web origins whose pages may send requests; `*` means any. `trusted_proxies` are
    addresses or networks whose `x-user-*` headers identify the user. `allowed_hosts` are host names that a server
    without keys accepts in requests, in addition to IP addresses and `localhost` (None: any; `serve` always sets them).
    If `strict_fields`, unknown fields of a body are refused. `trace_share`, from 0 to 1, is the share of requests whose
    traces are written to `trace_folder`. Stored responses, conversations, batches and their files, traces and prompt
    caches are saved in the file `state_db` (None: they are lost when the server ends). `controller_classes` are the
    operator's classes of controllers, which requests may choose. `policies` are the operator's rules for texts.
    `default_max_tokens` limits the output of a request that sets no limit (None: the default of its API). `system`
    blocks on `/v1/messages` that begin with one of `drop_system_blocks` are omitted.
    """

    max_body_bytes: int | None = None
    max_requests: int = 512
    max_prompt_tokens: int = 1 << 20
    max_prompts: int = 128
    max_choices: int = 256
    max_uploads: int = 2
    request_timeout: float | None = None
    load_timeout: float = 300.0
    send_timeout: float = 30.0
    receive_timeout: float = 30.0
    ping_interval: float = 15.0
    cors_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    strict_fields: bool = False
    trace_folder: Path | None = None
    trace_share: float = 0.0
    state_db: Path | None = None
    controller_classes: Mapping[str, type[Controller]] = field(default_factory=dict)
    policies: PolicyRegistry | None = None
    default_max_tokens: int | None = None
    drop_system_blocks: tuple[str, ...] = DROPPED

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; must be at least 1", name)
        for name in ("request_timeout", "load_timeout", "send_timeout", "receive_timeout", "ping_interval"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value}; must be more than 0", name)
        if not 0 <= self.trace_share <= 1:
            raise InvalidRequest(f"trace_share is {self.trace_share}; must be between 0 and 1", "trace_share")
        if self.trace_share and self.trace_folder is None:
            raise InvalidRequest("trace_share is given without a trace_folder; set trace_folder, too", "trace_share")
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise InvalidRequest(f"trusted_proxies: {error}", "trusted_proxies") from None
        AllowedHosts(self.allowed_hosts or ())
        if "" in self.drop_system_blocks:
            message = (
                f"drop_system_blocks has '', with which every block begins; give a longer prefix, or {NONE!r} alone"
            )
            raise InvalidRequest(message, "drop_system_blocks")

    def answering_to(self, host: str) -> HttpSettings:
        """Return the settings with the allowed hosts of a server that listens on `host`."""
        return replace(self, allowed_hosts=(*(self.allowed_hosts or ()), *filter(None, (host,))))


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """All settings of `serve`: models, engines, limits, and the address to listen on.

    Port 0 means any free port. After the first SIGTERM or SIGINT, running requests have `grace_period` seconds to
    finish. If `drain_parked` is `wait`, the next requests of conversations with retained KV are accepted during this
    period, too. `model` has the load settings, and the model's name unless `models` names several models or models to
    load on demand. `adapters` are the LoRA adapters that requests may choose. `name` is a single model's name in the
    APIs (None: the name of its folder or hub id). `aliases` are further names of the first model. `control` has the
    settings of the runtime for Wasm controllers. `keys` is the file of API keys. Without keys, the server is for a
    single user and listens on loopback only, unless `no_auth` allows all users. `tls` turns on HTTPS. `otlp_endpoint`
    is the collector of trace spans (None: the collector that OpenTelemetry's environment variables name, if any).
    `tools` are the tools that controllers may call. `restarts` limits the time of a step and the number of restarts of
    an engine. `front_ends` is the number of processes that write streams to clients, including the server.
    `make_loader` creates the loader of models; by default models are loaded in this process.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    models: ModelSet | None = None
    adapters: AdapterSet = field(default_factory=AdapterSet)
    engine: EngineConfig = field(default_factory=EngineConfig)
    http: HttpSettings = field(default_factory=HttpSettings)
    host: str = "127.0.0.1"
    port: int = 8080
    name: str | None = None
    aliases: tuple[str, ...] = ()
    grace_period: float = 30.0
    drain_parked: Literal["end", "wait"] = "end"
    log_format: LogFormat = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    max_connections: int = 4096
    max_header_bytes: int = 64 << 10
    max_message_bytes: int = 16 << 20
    control: ControlSettings = field(default_factory=ControlSettings)
    keys: Path | None = None
    no_auth: bool = False
    tls: TlsFiles | None = None
    otlp_endpoint: str | None = None
    tools: ToolExecutor | None = None
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    front_ends: int = 1
    make_loader: Callable[[EngineConfig, ControlSettings], ModelLoader] = EngineLoader

    def __post_init__(self) -> None:
        check_port(self.port)
        if not self.grace_period >= 0:
            raise InvalidRequest(f"grace_period is {self.grace_period}; must be at least 0", "grace_period")
        if self.keys is not None and self.no_auth:
            raise InvalidRequest("keys and no_auth cannot be combined: leave one of them out", "no_auth")
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        for name in ("max_connections", "max_header_bytes", "max_message_bytes", "front_ends"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; must be at least 1", name)
        if self.front_ends > 1:
            self._check_front_ends()

    def _check_front_ends(self) -> None:
        """Raise `InvalidRequest` if writer processes are configured but cannot write to clients."""
        if self.front_ends > MAX_FRONT_ENDS:
            raise InvalidRequest(f"front_ends is {self.front_ends}; must be at most {MAX_FRONT_ENDS}", "front_ends")
        if self.tls is not None:
            raise InvalidRequest(
                f"front_ends is {self.front_ends}, which is not supported with TLS: leave front_ends out, or end TLS "
                "at a proxy before the server",
                "front_ends",
            )
        if sys.platform == "win32":
            message = f"front_ends is {self.front_ends}; on Windows only 1 is possible, since sockets cannot be shared"
            raise InvalidRequest(message, "front_ends")
