"""Self-signed certificates for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(
    folder: Path, password: str | None = None, names: str = "DNS:localhost,IP:127.0.0.1"
) -> tuple[Path, Path]:
    """Write a self-signed certificate for localhost or other names, and its key. Returns both paths."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes certificates with openssl")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost"
    lock = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    uses = ["-addext", f"subjectAltName={names}", "-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    files = ["-keyout", key, "-out", certificate]
    subprocess.run([openssl, "req", *kind.split(), *lock, *uses, *files], check=True, capture_output=True)
    return certificate, key
