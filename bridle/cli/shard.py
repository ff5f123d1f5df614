"""`bridle shard`: a model in a process of its own, for a router to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from bridle.cli.options import ModelOptions, RoomOptions

_SHARD = Group("Shard", sort_key=5)
_MODEL_DEFAULT = ModelOptions()
_ROOM_DEFAULT = RoomOptions()


def shard(
    name: Annotated[str, Parameter(name="MODEL")] = "demo",
    /,
    *,
    listen: Annotated[str, Parameter(group=_SHARD)] = "127.0.0.1:8090",
    tls_cert: Annotated[Path | None, Parameter(group=_SHARD)] = None,
    tls_key: Annotated[Path | None, Parameter(group=_SHARD)] = None,
    tls_ca: Annotated[Path | None, Parameter(group=_SHARD)] = None,
    shards: Annotated[int, Parameter(group=_SHARD)] = 1,
    log_format: Annotated[Literal["auto", "console", "json"], Parameter(group=_SHARD)] = "auto",
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Parameter(group=_SHARD)] = "info",
    rank: Annotated[int, Parameter(show=False)] = 0,
    store: Annotated[Path | None, Parameter(show=False)] = None,
    parent: Annotated[int | None, Parameter(show=False)] = None,
    model: ModelOptions = _MODEL_DEFAULT,
    room: RoomOptions = _ROOM_DEFAULT,
) -> int:
    """Compute for a router in another process, over gRPC.

    `bridle serve --isolate-model` starts one by itself; start your own to put the model on another machine:
    `bridle shard MODEL --listen 10.0.0.5:8090 --tls-cert CERT --tls-key KEY --tls-ca CA` there, and
    `bridle serve MODEL --shard 10.0.0.5:8090` with the same TLS flags here.

    Parameters
    ----------
    name
        Folder, hub id or `demo`.
    listen
        `unix:/path/to/socket` or `host:port`; port 0 takes a free one. Without TLS only loopback is allowed.
    tls_cert
        Certificate of this shard, PEM.
    tls_key
        Its private key, PEM.
    tls_ca
        Authority that must have signed the router's certificate, PEM. Without it everybody who trusts ours may connect.
    shards
        Processes that compute the model together, each with a part of every layer (tensor parallelism).
    log_format
        `console`, `json`, or `auto`.
    log_level
        The least important lines to log.
    """
    from bridle.cluster.address import Tls, check_address
    from bridle.cluster.parent import die_with_parent
    from bridle.cluster.process import run_shard
    from bridle.deploy.group import load_group
    from bridle.http.logs import configure_logs
    from bridle.model import load_executor
    from bridle.telemetry import traced_process

    if parent is not None:
        die_with_parent(parent)
    configure_logs(log_format, log_level)
    check_address(listen)
    tls = Tls(tls_cert, tls_key, tls_ca) if tls_cert or tls_key else None
    config = room.add_to(model.to_config(name))
    if rank:
        from bridle.deploy.group import run_member

        return run_member(config, shards, rank, store)

    def announce(address: str) -> None:
        if parent is None:
            print(f"Shard of {name} at {address} (stop with Ctrl+C)", flush=True)

    with traced_process():
        executor = load_executor(config) if shards == 1 else load_group(config, shards)
        # Loading has run the largest step.
        return run_shard(executor, listen, tls=tls, warm=False, on_listening=announce)
