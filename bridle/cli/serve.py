"""`bridle serve`: a model behind HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from bridle.cli.options import EngineOptions, ModelOptions
from bridle.cli.sizes import count

if TYPE_CHECKING:
    from bridle.http.settings import ServeSettings
    from bridle.service.control import ControlSettings

_SERVER = Group("Server", sort_key=5)
_ACCESS = Group("Access", sort_key=6)
_CONTROL = Group("Controllers", sort_key=7)


@Parameter(name="*", group=_ACCESS)
@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Who may use the server."""

    keys: Path | None = None
    "File of API keys (see `bridle keys`): every route but health asks for one."
    no_auth: Annotated[bool, Parameter(negative="")] = False
    "Without keys, listen also where others can reach it, and let everybody in."
    trusted_proxy: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Address or network of a proxy whose `x-user-id` and `x-user-role` headers are believed; may be repeated."


@Parameter(name="*", group=_CONTROL)
@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """The runtime that hosts Wasm controllers."""

    control: Literal["auto", "on", "off"] = "auto"
    "`auto` starts the control runtime if its packages are installed."
    control_store: Path | None = None
    "Folder of uploaded controllers. Default: in the user's data folder."
    aici_rt: str | None = None
    "Path of another control runtime than bridle's own."
    aici_rtarg: Annotated[
        tuple[str, ...], Parameter(name=["--aici-rtarg", "-A"], negative="", allow_leading_hyphen=True)
    ] = ()
    "A further argument for the control runtime; may be repeated."
    aici_dialect: Literal[1, 2] = 2
    "Dialect that the control runtime speaks."
    aici_trace: Path | None = None
    "Record what engine and control runtime say to each other; see `bridle replay`."

    def to_settings(self) -> ControlSettings:
        from bridle.service.control import ControlSettings

        return ControlSettings(
            mode=self.control,
            runtime=self.aici_rt,
            args=self.aici_rtarg,
            dialect=self.aici_dialect,
            trace=self.aici_trace,
            store=self.control_store,
        )


@Parameter(name="*", group=_SERVER)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    "Address to listen on. The default is reachable from this machine alone; 0.0.0.0 from everywhere."
    port: int = 8080
    "Port to listen on; 0 takes a free one."
    served_name: str | None = None
    "The model's name on the wire. Default: that of the folder or hub id."
    alias: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "A further name for the model; may be given several times."
    max_requests: Annotated[int, Parameter(converter=count)] = 512
    "Most requests in flight; further ones get a 429."
    request_timeout: float | None = None
    "Seconds that a generation may take. Default: no limit."
    grace_period: float = 30.0
    "Seconds that running requests get after the first Ctrl-C or SIGTERM."
    cors_origin: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "A web origin whose pages may call the server, `*` for any; may be given several times."
    log_format: Literal["auto", "console", "json"] = "auto"
    "How log lines look; `auto` is for people in a terminal and JSON elsewhere."
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    "The least important lines to log."

    def to_settings(
        self, name: str, model: ModelOptions, engine: EngineOptions, access: AccessOptions, control: ControlOptions
    ) -> ServeSettings:
        from bridle.http.settings import HttpSettings, ServeSettings

        http = HttpSettings(
            max_requests=self.max_requests,
            request_timeout=self.request_timeout,
            cors_origins=self.cors_origin,
            trusted_proxies=access.trusted_proxy,
        )
        return ServeSettings(
            model=model.to_config(name),
            engine=engine.to_config(),
            http=http,
            host=self.host,
            port=self.port,
            name=self.served_name,
            aliases=self.alias,
            grace_period=self.grace_period,
            log_format=self.log_format,
            log_level=self.log_level,
            control=control.to_settings(),
            keys=access.keys,
            no_auth=access.no_auth,
        )


_SERVER_DEFAULT = ServerOptions()
_MODEL_DEFAULT = ModelOptions()
_ENGINE_DEFAULT = EngineOptions()
_ACCESS_DEFAULT = AccessOptions()
_CONTROL_DEFAULT = ControlOptions()


def serve(
    name: Annotated[str, Parameter(name="MODEL")] = "demo",
    /,
    *,
    server: ServerOptions = _SERVER_DEFAULT,
    model: ModelOptions = _MODEL_DEFAULT,
    engine: EngineOptions = _ENGINE_DEFAULT,
    access: AccessOptions = _ACCESS_DEFAULT,
    control: ControlOptions = _CONTROL_DEFAULT,
) -> int:
    """Serve a model over HTTP, with the OpenAI API and the AICI API for controllers.

    `bridle serve` serves the demo model on http://127.0.0.1:8080; `bridle serve Qwen/Qwen3-0.6B --port 9000`
    another one elsewhere.

    Parameters
    ----------
    name
        Folder, hub id or `demo`.
    """
    settings = server.to_settings(name, model, engine, access, control)
    from bridle.http.server import serve as serve_http

    serve_http(settings)
    return 0
