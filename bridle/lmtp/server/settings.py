"""Settings of the LMTP server, as plain validated values."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LmtpSettings:
    """Limits of the LMTP server. Times are in seconds.

    `path` is a path of LMTP's WebSockets on the HTTP server, in addition to `/`. A connection has at most `max_streams`
    open streams and `max_buffers` buffers, with at most `max_buffer_tokens` tokens in total. `load_timeout` limits how
    long a request waits for its model. A stream with a key continues for `resume_time` after its connection is lost,
    and can be resumed for the same time after its end. At most `max_detached` streams with a key may be without a
    connection. All streams with a key together store at most `max_replay_size` tokens and alternatives.
    `allowed_origins` are web origins whose pages may connect; `*` allows any.
    """

    path: str = "/lmtp"
    max_streams: int = 1024
    max_buffers: int = 256
    max_buffer_tokens: int = 1 << 20
    load_timeout: float = 600.0
    request_timeout: float | None = None
    resume_time: float = 60.0
    max_detached: int = 256
    max_replay_size: int = 1 << 18
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_streams", "max_buffers", "max_buffer_tokens", "max_detached", "max_replay_size"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; must be at least 1", name)
        for name in ("load_timeout", "resume_time", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value}; must be more than 0", name)
        if not self.path.startswith("/"):
            raise InvalidRequest(f"the LMTP path is {self.path!r}; must begin with '/'", "path")
