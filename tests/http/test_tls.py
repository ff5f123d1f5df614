"""Tests of the server's own HTTPS: protocols, settings that are refused at startup, and renewed certificates."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from bridle.cli.access_options import AccessOptions
from bridle.errors import InvalidRequest
from bridle.http.server.tls import TlsFiles
from tests.http.certificates import make_certificate
from tests.http.small_server import small_server
from tests.waiting import PATIENCE


def test_a_server_speaks_https_and_nothing_else(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with small_server(5.0, certificate, key) as server:
        assert server.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        body = {"prompt": "a", "max_tokens": 3}
        server.hurry()
        answer = httpx.post(server.url + "v1/completions", json=body, verify=trust, timeout=PATIENCE)
        assert answer.json()["usage"]["completion_tokens"] == 3
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http"), timeout=PATIENCE)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url, verify=old, timeout=PATIENCE)
        server.signal_and_wait(signal.SIGTERM)
        assert server.process.wait() == 0


def test_an_encrypted_key_needs_its_password(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, password="secret")
    assert TlsFiles(certificate, key, "secret").make_context().get_ca_certs() == []
    for wrong in (None, "other"):
        with pytest.raises(InvalidRequest, match="cannot be used"):
            TlsFiles(certificate, key, wrong).make_context()


def test_files_that_are_no_pair_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = make_certificate(tmp_path / "a"), make_certificate(tmp_path / "b")
    for files in (TlsFiles(first[0], second[1]), TlsFiles(tmp_path / "none.pem"), TlsFiles(first[1], first[1])):
        with pytest.raises(InvalidRequest, match=str(files.certificate)):
            files.make_context()
    with pytest.raises(InvalidRequest, match="--ssl-certfile"):
        AccessOptions(ssl_keyfile=first[1]).tls()


async def test_a_renewed_certificate_serves_new_connections(tmp_path: Path) -> None:
    """A pair of files that is only half written changes nothing."""
    files = TlsFiles(*make_certificate(tmp_path))
    context = files.make_context()
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    renewing = asyncio.create_task(files.keep_fresh(context, pause=0))
    try:
        first = await _certificate(port)
        (tmp_path / "new").mkdir()
        new, new_key = make_certificate(tmp_path / "new")
        os.replace(new, files.certificate)  # the key is still the old one's
        for _ in range(20):
            assert await _certificate(port) == first
        assert files.key is not None
        os.replace(new_key, files.key)
        while await _certificate(port) == first:
            pass
    finally:
        renewing.cancel()
        server.close()


async def _certificate(port: int) -> bytes | None:
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found
