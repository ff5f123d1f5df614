"""Flags for a server's limits: the size and number of requests, and the time of each request."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from bridle.chat.system_blocks import DROPPED, NONE
from bridle.cli.options import Count
from bridle.cli.units import byte_size, count
from bridle.compat.cli_flags import spellings

if TYPE_CHECKING:
    from bridle.http.settings import ServeSettings

_LIMITS = Group("Limits", sort_key=9)
_OF_THE_SERVER = ("max_connections", "max_header_bytes")


@Parameter(name="*", group=_LIMITS)
@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Flags for limits on each client, and on all clients together."""

    max_prompt_tokens: Annotated[int, Parameter(converter=count)] = 1 << 20
    "Maximum number of prompt tokens in flight, queued or running. Further requests get status 429."
    max_body_bytes: Annotated[int | None, Parameter(name=spellings("--max-body-bytes"), converter=byte_size)] = None
    "Maximum size of a request body, such as `16MiB`. Default: 4MiB, or 32MiB for models that read images."
    max_header_bytes: Annotated[int, Parameter(converter=byte_size)] = 64 << 10
    "Maximum size of a request's first line and headers."
    max_prompts: Annotated[int, Parameter(name=spellings("--max-prompts"), converter=count)] = 128
    "Maximum number of prompts in one request."
    max_choices: Annotated[int, Parameter(converter=count)] = 256
    "Maximum number of choices in one request, over all its prompts."
    default_max_tokens: Count = None
    """Maximum number of output tokens of requests that set no limit. Default: the limit of the API or the checkpoint,
    else as many as fit into the context."""
    max_connections: Annotated[int, Parameter(converter=count)] = 4096
    "Maximum number of open connections, including WebSockets. Further connections get status 429."
    receive_timeout: float = 30.0
    "Seconds in which a request's headers must arrive. Its body has the same time after them."
    send_timeout: float = 30.0
    "Seconds after which the server disconnects a client that does not read its answer."
    ping_interval: Annotated[float, Parameter(name=spellings("--ping-interval"))] = 15.0
    "Seconds between keep-alive events of a stream that has nothing to send."
    watchdog_timeout: float = 300.0
    """Maximum seconds of one step of an engine. A longer step ends the engine's requests and restarts the engine. 0: no
    limit."""
    max_engine_restarts: int = 5
    """Maximum number of restarts in a row of an engine that fails or hangs. After them, a server with no other model
    stops."""
    strict_fields: Annotated[bool, Parameter(negative="")] = False
    "Reject requests with unknown fields, even harmless ones."

    drop_system_block: Annotated[tuple[str, ...], Parameter(negative="")] = DROPPED
    """Remove `system` blocks of /v1/messages that start with this text. Such blocks differ per session and prevent
    prefix caching. `none` keeps all blocks. Repeatable."""

    def add_to(self, settings: ServeSettings) -> ServeSettings:
        """Return the settings of a server with these limits."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        from bridle.serving.models.engine_supervisor import RestartPolicy

        own = {name: given.pop(name) for name in _OF_THE_SERVER}
        blocks = given.pop("drop_system_block")
        given["drop_system_blocks"] = () if blocks == (NONE,) else blocks
        policy = RestartPolicy(given.pop("watchdog_timeout"), given.pop("max_engine_restarts"))
        return replace(settings, http=replace(settings.http, **given), restarts=policy, **own)
