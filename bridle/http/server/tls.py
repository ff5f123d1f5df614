"""TLS for the server. The certificate and the key are loaded again when their files change.

Open connections keep their certificate; new connections get the new certificate. If changed files
cannot be read, the old certificate stays in use, and the log reports the error.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import structlog

from bridle.errors import InvalidRequest

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.tls")
#: Seconds between two checks of the files. Certificates are renewed weeks before they expire.
LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """TLS files in PEM format: the certificate with its chain, and its private key, which may be in the same file.
    `password` decrypts an encrypted key."""

    certificate: Path
    key: Path | None = None
    password: str | None = None

    def make_context(self) -> ssl.SSLContext:
        """Return the TLS context for a server socket, for TLS 1.2 and newer. Raises `InvalidRequest` if the files
        cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, self.password or "")
        except OSError as error:  # `ssl.SSLError` is a subclass
            files = str(self.certificate) if self.key is None else f"{self.certificate} and {self.key}"
            reason = error.strerror or str(error)
            raise InvalidRequest(
                f"ssl_certfile: {files} cannot be used: {reason}; both must be PEM files, and the key must "
                "belong to the certificate",
                "ssl_certfile",
            ) from None

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        """Return values that change when a file is replaced or written."""
        paths = (self.certificate,) if self.key is None else (self.certificate, self.key)
        return tuple((found.st_ino, found.st_size, found.st_mtime_ns) for found in (path.stat() for path in paths))

    async def keep_fresh(self, context: ssl.SSLContext, pause: float = LOOK_SECONDS) -> None:
        """Load the files again into `context` whenever they have changed, until this task is cancelled."""
        known = self._state()
        while True:
            await asyncio.sleep(pause)
            try:
                found = self._state()
                if found != known:
                    self.make_context()  # first in a new context: an invalid pair must not change half of `context`
                    self._load_into(context)
                    _log.info("certificate renewed", file=str(self.certificate))
                    known = found
            except (OSError, InvalidRequest) as error:
                _log.warning("certificate not renewed", file=str(self.certificate), reason=str(error))
