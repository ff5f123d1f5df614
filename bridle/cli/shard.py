"""`bridle shard`: computes a model in a separate process, for a router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from bridle.cli.options import CapacityOptions, ModelOptions
from bridle.cli.preflight import check_models
from bridle.errors import InvalidRequest
from bridle.logs import LogFormat

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.distributed.address import Tls

_SHARD = Group("Shard", sort_key=5)


@Parameter(name="*", group=_SHARD)
@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Options for the shard's address, TLS and logs."""

    listen: str = "127.0.0.1:8090"
    """Address to listen on: `unix:/path` or `host:port`; port 0 takes a free one. Without TLS it must be a loopback
    address."""
    tls_cert: Path | None = None
    "PEM file with the certificate of this shard."
    tls_key: Path | None = None
    "PEM file with the private key of the certificate."
    tls_ca: Path | None = None
    "PEM file with the CA that must have signed the server's certificate. Default: accept any server."
    log_format: LogFormat = "auto"
    """Form of log lines: `console` has five fields per request, `full` has all fields, `json` is for programs. `auto`
    is `console` on a terminal, else `json`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    "Lowest level to log."

    def to_tls(self) -> Tls | None:
        from bridle.distributed.address import Tls

        return Tls(self.tls_cert, self.tls_key, self.tls_ca) if self.tls_cert or self.tls_key else None


@Parameter(name="*", show=False)
@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Options with which a parent process numbers this process, if several compute the model together."""

    rank: Annotated[int, Parameter(show=False)] = 0
    store: Annotated[Path | None, Parameter(show=False)] = None
    parent: Annotated[int | None, Parameter(show=False)] = None
    standby: Annotated[bool, Parameter(show=False)] = False


def shard(
    name: Annotated[str, Parameter(name="MODEL")] = "demo",
    /,
    *,
    shards: Annotated[int, Parameter(group=_SHARD)] = 1,
    listen: ListenOptions = ListenOptions(),
    place: PlaceOptions = PlaceOptions(),
    model: ModelOptions = ModelOptions(),
    capacity: CapacityOptions = CapacityOptions(),
) -> int:
    """Compute a model for a server in another process, over gRPC.

    `bridle serve --isolate-model` starts a shard by itself. To use another machine, run
    `bridle shard MODEL --listen 10.0.0.5:8090 --tls-cert CERT --tls-key KEY --tls-ca CA` there. Then run
    `bridle serve MODEL --shard 10.0.0.5:8090` with the same TLS flags here.

    Parameters
    ----------
    name
        Model to load: folder, hub id or `demo`.
    shards
        Number of processes that compute the model together (tensor parallelism).
    """
    from bridle.distributed.address import check_address
    from bridle.distributed.child_process import die_with_parent
    from bridle.logs import configure_logs

    if place.parent is not None:
        die_with_parent(place.parent)
    configure_logs(listen.log_format, listen.log_level)
    check_address(listen.listen)
    config = capacity.add_to(model.to_config(name))
    if config.draft_model is not None:
        raise InvalidRequest("a draft model runs in the process of its engine, not in a shard", "draft_model")
    if place.parent is None:  # otherwise the starting process has checked the name
        check_models(name, model.tokenizer, revision=model.revision)
    if place.rank:
        from bridle.launch.group import run_member

        return run_member(config, shards, place.rank, place.store)
    return _serve(config, shards, listen, place)


def _serve(config: ModelConfig, shards: int, listen: ListenOptions, place: PlaceOptions) -> int:
    """Load the model, then compute for routers until a signal ends the process. Returns the exit status."""
    from bridle.backends import load_executor
    from bridle.distributed.process import run_shard
    from bridle.launch.group import load_group
    from bridle.launch.warm_standby import wait_for_activation
    from bridle.telemetry import traced_process

    def announce(address: str) -> None:
        if place.parent is None:
            print(f"Shard of {config.model} at {address} (stop with Ctrl+C)", flush=True)

    if place.standby:  # slow imports are done before this
        wait_for_activation()
    with traced_process():
        executor = load_executor(config) if shards == 1 else load_group(config, shards)
        # The largest step ran while the model was loaded.
        return run_shard(executor, listen.listen, tls=listen.to_tls(), warm=False, on_listening=announce)
