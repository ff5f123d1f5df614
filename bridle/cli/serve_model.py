"""`bridle serve-model`: serves a model over LMTP. This command has the options of LMQL's `serve-model` that bridle can
support.

The command is `bridle serve` with other options, so the server also has the HTTP routes. With `--transport stdio`, the
command serves a parent process over standard input and output instead.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TextIO, get_args

from cyclopts import Group, Parameter

from bridle.cli.access_options import AccessOptions
from bridle.cli.adapter_options import AdapterOptions
from bridle.cli.control_options import ControlOptions, ToolOptions
from bridle.cli.policy_options import PolicyOptions
from bridle.cli.preflight import check_address, check_models
from bridle.cli.serve import ModelSetOptions
from bridle.cli.signals import ending_at_once
from bridle.cli.units import count
from bridle.config import DType, EngineConfig, ModelConfig
from bridle.errors import InvalidRequest
from bridle.logs import LogFormat

if TYPE_CHECKING:
    from bridle.http.settings import ServeSettings
    from bridle.lmtp.server import LmtpSettings
    from bridle.serving import ModelRegistry

_LMTP = Group("LMTP", sort_key=5)
_FLAG = Parameter(negative="")
_MAX_ECHO_CHARS = 2_000


@Parameter(name="*", group=_LMTP)
@dataclass(frozen=True, kw_only=True)
class LmtpOptions:
    """Options of LMQL's `serve-model`, with their meaning in bridle."""

    host: str = "localhost"
    "Address to listen on; 0.0.0.0 makes the server reachable from other machines."
    port: int = 8080
    "Port to listen on; LMQL uses 8080. 0 takes a free one."
    path: str = "/lmtp"
    "Path of the LMTP WebSocket, in addition to `/`."
    transport: Literal["websocket", "stdio"] = "websocket"
    "Transport: `websocket`, or `stdio` to exchange lines with the parent process over standard input and output."
    cuda: Annotated[bool, _FLAG] = False
    "Use a GPU. If there is none, a warning is printed and the CPU is used."
    dtype: str = "auto"
    "Type of the weights: `float32`, `bfloat16`, `float16`, or `8bit` for compressed weights."
    bits: Literal[8, 16, 32] | None = None
    "Number of bits of each weight. Use it instead of `--dtype`."
    batch_size: Annotated[int | None, Parameter(name=["--batch-size", "--batch_size"], converter=count)] = None
    "Maximum number of streams that run at once. Default: the backend's limit."
    single_thread: Annotated[bool, Parameter(name=["--single-thread", "--single_thread"], negative="")] = False
    "Same as `--static`."
    tool_format: str = "auto"
    "Format of tool calls: a name such as `hermes`, or a JSON file. `auto` infers it from the chat template."
    reasoning_format: str = "auto"
    "Tags around reasoning: a name such as `deepseek_r1`. `auto` infers them from the chat template."
    tool_prompt: Literal["describe", "refuse"] = "describe"
    """Handling of tools that the chat template leaves out: `describe` them in the system message, or `refuse` the
    request."""
    thinking_budget_message: str = ""
    """Last sentence of the reasoning if a request's `thinking_budget` runs out. The request field
    `thinking_budget_message` overrides it. Default: none."""
    docker_hide_port: Annotated[bool, Parameter(name=["--docker-hide-port", "--docker_hide_port"], negative="")] = False
    "Omit the port from the address that is printed at the start."
    silent: Annotated[bool, _FLAG] = False
    "Print nothing while loading."
    verbose: Annotated[bool, _FLAG] = False
    "Print each message from clients."
    log_format: LogFormat = "auto"
    """Form of log lines: `console` has five fields per request, `full` has all fields, `json` is for programs. `auto`
    is `console` on a terminal, else `json`."""

    def to_config(self, model: str) -> ModelConfig:
        from bridle.chat.tool_parsers.presets import check_names

        check_names(self.tool_format, self.reasoning_format)
        dtype, is_int8 = _dtype(self.dtype, self.bits)
        device = "cuda" if self.cuda and _has_gpu() else "cpu" if self.cuda else "auto"
        return ModelConfig(
            model=model,
            dtype=dtype,
            device=device,
            quantization="int8" if is_int8 else "none",
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
            tool_prompt=self.tool_prompt,
            thinking_budget_message=self.thinking_budget_message,
        )


def serve_model(
    name: Annotated[str, Parameter(name="MODEL")] = "auto",
    /,
    *,
    lmtp: LmtpOptions = LmtpOptions(),
    models: ModelSetOptions = ModelSetOptions(),
    access: AccessOptions = AccessOptions(),
    control: ControlOptions = ControlOptions(),
    adapters: AdapterOptions = AdapterOptions(),
    policies: PolicyOptions = PolicyOptions(),
    tools: ToolOptions = ToolOptions(),
) -> int:
    """Serve a model to LMQL and other clients of LMTP.

    `bridle serve-model gpt2-medium --cuda` serves it at ws://localhost:8080/, where LMQL expects it.

    Parameters
    ----------
    name
        Model to load: folder, hub id or `demo`. `auto` loads the models that requests name, within `--models-dir`,
        `--allow-hub` and `--model-alias`.
    """
    if lmtp.transport == "websocket":
        check_address(lmtp.host, lmtp.port)
    check_models(None if name == "auto" else name)
    from bridle.lmtp.server import LmtpSettings

    settings = serve_settings(name, lmtp, models, access)
    http = replace(settings.http, policies=policies.book())
    settings = adapters.add_to(replace(settings, http=http, control=control.to_settings()))
    settings = tools.add_to(settings)
    limits = LmtpSettings(path=lmtp.path, load_timeout=models.load_timeout, allowed_origins=access.cors_origin)
    if not lmtp.silent and lmtp.transport == "websocket" and name != "auto":
        _say(f"[Loading {name} with {_constructor(settings.model)}]")
    if lmtp.transport == "stdio":
        _serve_lines(settings, limits, lmtp.verbose)
    else:
        serve_sockets(settings, limits, lmtp)
    return 0


def serve_settings(name: str, lmtp: LmtpOptions, models: ModelSetOptions, access: AccessOptions) -> ServeSettings:
    from bridle.http.settings import HttpSettings, ServeSettings
    from bridle.serving import model_name

    # LMQL sends the model name that its user wrote; for a folder, that is the whole path.
    aliases = (name,) if name != "auto" and model_name(name) != name else ()
    known = replace(models, static=models.static or lmtp.single_thread)
    return ServeSettings(
        model=lmtp.to_config(name),
        models=known.to_set((name,)),
        engine=EngineConfig(max_num_seqs=lmtp.batch_size),
        http=HttpSettings(
            load_timeout=models.load_timeout,
            cors_origins=access.cors_origin,
            trusted_proxies=access.trusted_proxy,
            allowed_hosts=access.allowed_host or None,
        ),
        host=lmtp.host,
        port=lmtp.port,
        aliases=aliases,
        log_format=lmtp.log_format,
        log_level="error" if lmtp.silent else "warning",
        keys=access.keys,
        no_auth=access.no_auth,
        tls=access.tls(),
    )


def serve_sockets(settings: ServeSettings, limits: LmtpSettings, lmtp: LmtpOptions) -> None:
    from bridle.http.server.run import serve
    from bridle.lmtp.server import websocket_front

    scheme = "ws" if settings.tls is None else "wss"

    def announce(registry: ModelRegistry, address: str) -> None:
        shown = address.rpartition(":")[0] if lmtp.docker_hide_port else address
        _say(f"[Serving LMTP endpoint on {scheme}://{shown}/]")
        for model in registry:
            _say(f"[{model.name} ready on device {model.info.device}]")

    with ending_at_once():
        serve(settings, fronts=[websocket_front(limits, say_short if lmtp.verbose else None)], announce=announce)


def _serve_lines(settings: ServeSettings, limits: LmtpSettings, verbose: bool) -> None:
    """Serve LMTP to the parent process until it closes this process's standard input."""
    from contextlib import closing, nullcontext

    from bridle.http.server.run import load_registry
    from bridle.lmtp.server import LmtpServer, LocalHost
    from bridle.lmtp.server.line_transport import stdio_link
    from bridle.logs import configure_logs
    from bridle.serving import Admission
    from bridle.serving.policies import PolicyRegistry

    configure_logs(settings.log_format, settings.log_level)
    echo = (lambda text: say_short(text, sys.stderr)) if verbose else None

    async def run() -> None:
        host = LocalHost(registry, Admission(), policies=settings.http.policies or PolicyRegistry())
        server = LmtpServer(host, limits, echo)
        await server.serve(await stdio_link())
        await server.close()

    with ending_at_once():
        registry = load_registry(settings)
    with closing(registry), closing(settings.tools) if settings.tools is not None else nullcontext():
        asyncio.run(run())


def _dtype(name: str, bits: int | None) -> tuple[DType, bool]:
    """Return the data type of the weights, and whether the weights are quantized to 8 bits."""
    if name == "8bit" or bits == 8:
        return "auto", True
    if name not in get_args(DType):
        raise InvalidRequest(f"dtype is {name!r}; must be one of {', '.join(get_args(DType))} or 8bit", "dtype")
    if name == "auto" and bits is not None:
        return ("float16" if bits == 16 else "float32"), False
    return name, False  # type: ignore[return-value]  # one of DType's names


def _has_gpu() -> bool:
    import torch

    if torch.cuda.is_available():
        return True
    _say("[No CUDA device found: --cuda has no effect, the model runs on the CPU]", sys.stderr)
    return False


def _constructor(config: ModelConfig) -> str:
    given = {"dtype": config.dtype, "device": config.device, "quantization": config.quantization}
    plain = {"dtype": "auto", "device": "auto", "quantization": "none"}
    options = "".join(f", {name}={value!r}" for name, value in given.items() if value != plain[name])
    return f"bridle.LLM({config.model!r}{options})"


def say_short(text: str, stream: TextIO | None = None) -> None:
    """Print a client's value on one line of limited length, with control characters escaped."""
    shown = text[:_MAX_ECHO_CHARS].encode("unicode_escape").decode() if not text.isprintable() else text
    _say(shown if len(shown) <= _MAX_ECHO_CHARS else f"{shown[:_MAX_ECHO_CHARS]}... ({len(text)} characters)", stream)


def _say(text: str, stream: TextIO | None = None) -> None:
    print(text, file=stream or sys.stdout, flush=True)
