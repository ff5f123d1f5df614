"""Flags that say who may use a server, and with which certificate it shows itself."""

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
    """Who may use the server."""

    keys: Path | None = None
    "File of API keys (see `bridle keys`). Every route but health then asks for a key."
    no_auth: Annotated[bool, Parameter(negative="")] = False
    "Listen without keys also where other machines can reach the server, and let everybody in."
    trusted_proxy: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Address or network of a proxy whose `x-user-id` and `x-user-role` headers are believed; may be repeated."
    allowed_host: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Without keys: a further host name that requests may use; `.example.com` allows all below it; may be repeated."
    cors_origin: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "A web origin whose pages may call the server, `*` for any; may be given several times."
    ssl_certfile: Annotated[Path | None, Parameter(name=spellings("--ssl-certfile"))] = None
    "Certificate for HTTPS with its chain, PEM. The server reads it again when it is renewed."
    ssl_keyfile: Annotated[Path | None, Parameter(name=spellings("--ssl-keyfile"))] = None
    "Private key of the certificate, PEM. Default: in the same file."
    ssl_keyfile_password: str | None = None
    "Password of the private key; better given as the variable BRIDLE_SSL_KEYFILE_PASSWORD."

    def tls(self) -> TlsFiles | None:
        """The files of the certificate, if there is one."""
        from bridle.http.server.tls import TlsFiles

        if self.ssl_certfile is not None:
            return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password)
        if self.ssl_keyfile is not None:
            raise InvalidRequest("ssl_keyfile needs a certificate: give --ssl-certfile, too", "ssl_keyfile")
        return None
