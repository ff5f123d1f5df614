"""Flags for the users of a server and for its certificate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from bridle.compat.cli_flags import spellings
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.http.server.tls import TlsFiles

_ACCESS = Group("Access", sort_key=6)


@Parameter(name="*", group=_ACCESS)
@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Flags for access to the server."""

    keys: Path | None = None
    "File of API keys, as `bridle keys` writes it. Every route except health checks then needs a key."
    no_auth: Annotated[bool, Parameter(negative="")] = False
    "Accept requests from other machines without an API key."
    trusted_proxy: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Address or network of a proxy whose `x-user-id`, `x-user-role` and `x-user-group` headers are trusted. Repeatable."
    allowed_host: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Additional host name that requests may use if the server has no API keys; `.example.com` includes subdomains.
    Repeatable."""
    cors_origin: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Web origin whose pages may call the server; `*` for any. Repeatable."
    ssl_certfile: Annotated[Path | None, Parameter(name=spellings("--ssl-certfile"))] = None
    "PEM file with the certificate chain for HTTPS. The server reloads it when it changes."
    ssl_keyfile: Annotated[Path | None, Parameter(name=spellings("--ssl-keyfile"))] = None
    "PEM file with the certificate's private key. Default: the file of `--ssl-certfile`."
    ssl_keyfile_password: str | None = None
    "Password of the private key. Prefer the environment variable BRIDLE_SSL_KEYFILE_PASSWORD."

    def tls(self) -> TlsFiles | None:
        """Return the files of the TLS certificate; None if the server has no certificate."""
        from bridle.http.server.tls import TlsFiles

        if self.ssl_certfile is not None:
            return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password)
        if self.ssl_keyfile is not None:
            raise InvalidRequest("ssl_keyfile is given without a certificate; give --ssl-certfile, too", "ssl_keyfile")
        return None
