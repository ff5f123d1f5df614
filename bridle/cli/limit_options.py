"""Flags about a server's bounds: what clients may send and ask for, how many they may be, and how slow."""

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
    """The bounds on one client, and on all clients together."""

    max_prompt_tokens: Annotated[int, Parameter(converter=count)] = 1 << 20
    "Most prompt tokens in flight, queued or running; further requests get a 429."
    max_body_bytes: Annotated[int | None, Parameter(name=spellings("--max-body-bytes"), converter=byte_size)] = None
    "Largest body of a request (`16MiB` works); 4 MiB unless given, 32 MiB where a model reads pictures."
    max_header_bytes: Annotated[int, Parameter(converter=byte_size)] = 64 << 10
    "Largest head of a request: its first line and headers."
    max_prompts: Annotated[int, Parameter(name=spellings("--max-prompts"), converter=count)] = 128
    "Most prompts in one call."
    max_choices: Annotated[int, Parameter(converter=count)] = 256
    "Most choices of one call, over all its prompts."
    default_max_tokens: Count = None
    (
        "Most output tokens of a request that sets no limit, on every API. Default: what the API says, else the "
        "checkpoint, else up to the context."
    )
    max_connections: Annotated[int, Parameter(converter=count)] = 4096
    "Most open connections, WebSockets included; requests on further ones get a 429."
    receive_timeout: float = 30.0
    "Seconds that a request's head may take to arrive, and its body."
    send_timeout: float = 30.0
    "Seconds that a client may leave its connection full before it is cut."
    ping_interval: Annotated[float, Parameter(name=spellings("--ping-interval"))] = 15.0
    "Seconds after which a quiet stream gets a comment or a `ping` event, so that clients and proxies keep it open."
    strict_fields: Annotated[bool, Parameter(negative="")] = False
    "Refuse bodies with any unknown field, even one that could not change a text."

    drop_system_block: Annotated[tuple[str, ...], Parameter(negative="")] = DROPPED
    (
        "Leave out the blocks of `system` on /v1/messages that begin like this, since they differ in every session and "
        "end the prefix cache; may be repeated; `none` keeps all."
    )

    def add_to(self, settings: ServeSettings) -> ServeSettings:
        """The settings of a server, with these bounds."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        own = {name: given.pop(name) for name in _OF_THE_SERVER}
        blocks = given.pop("drop_system_block")
        given["drop_system_blocks"] = () if blocks == (NONE,) else blocks
        return replace(settings, http=replace(settings.http, **given), **own)
