"""Tests that images are fetched only from listed hosts, at addresses that were checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.multimodal import ImageHosts, MediaLimits, Source, has_remote
from bridle.safe_http import HttpExchange, HttpLimits, HttpTarget, OutboundFailed, networks_of
from bridle.threads import start_thread
from tests.http.certificates import make_certificate
from tests.multimodal.picture_server import Files, png, served_pictures
from tests.waiting import PATIENCE, until

_HINT = r"\(set SSL_CERT_FILE\)"


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with served_pictures() as place:
        yield place


def fetch(hosts: ImageHosts, url: str, max_bytes: int = 2048, seconds: float = PATIENCE) -> bytes:
    return hosts.fetch(url, max_bytes, time.monotonic() + seconds, "it")


def test_a_picture_of_a_listed_host_is_fetched(place: str) -> None:
    """An image is fetched also after redirects within its host, whatever content type the server states."""
    hosts = ImageHosts([f"http://{place}"])
    for path in ("it.png", "to/_it.png", f"to/http:__{place}_it.png"):
        assert fetch(hosts, f"http://{place}/{path}") == png()
    assert Source(f"http://{place}/it.png", "it").open(MediaLimits(), hosts, time.monotonic() + PATIENCE) == png()


def test_a_certificate_is_trusted_as_the_operator_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate must be valid for the host name, and trusted by `SSL_CERT_FILE` or else by the system."""
    files = make_certificate(tmp_path)
    with served_pictures(*files) as place:
        port = place.partition(":")[2]
        hosts = ImageHosts([f"{place}=127.0.0.1/32", f"localhost:{port}=127.0.0.0/8"])
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        refusal = f"^it cannot be fetched: 127.0.0.1 has an untrusted certificate: .* {_HINT}$"
        Files.asked.clear()
        with pytest.raises(MediaRefused, match=refusal):
            fetch(hosts, f"https://{place}/it.png")
        assert Files.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
        for name in (place, f"localhost:{port}"):
            assert fetch(hosts, f"https://{name}/it.png") == png()


def test_a_certificate_of_another_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_certificate(tmp_path, names="DNS:pictures.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    with served_pictures(*files) as place:
        port = place.partition(":")[2]
        hosts = ImageHosts([place, f"localhost:{port}=127.0.0.0/8"])
        Files.asked.clear()
        for name, host in ((place, "127.0.0.1"), (f"localhost:{port}", "localhost")):
            with pytest.raises(MediaRefused, match=f"mismatch, certificate is not valid for '{host}'.*{_HINT}$"):
                fetch(hosts, f"https://{name}/it.png")
        assert Files.asked == []


@pytest.mark.parametrize(
    ("path", "kind", "why"),
    [
        ("none.png", MediaRefused, "it cannot be fetched: 127.0.0.1 answered with status 404$"),
        ("huge", MediaRefused, "more than 2048 bytes"),
        ("round", MediaRefused, "redirected more than 3 times"),
        (
            "to/http:__169.254.169.254_latest",
            UnsupportedFeature,
            "169.254.169.254:80; this server may not fetch",
        ),
        ("to/file:___etc_passwd", MediaRefused, "must be http or https"),
    ],
)
def test_what_goes_wrong_is_told(place: str, path: str, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        fetch(ImageHosts([f"http://{place}"]), f"http://{place}/{path}")


def test_a_server_that_hangs_ends_the_wait(place: str) -> None:
    """The time limit covers the whole answer, including one whose first bytes have arrived."""
    with pytest.raises(MediaRefused, match="it cannot be fetched: "):
        fetch(ImageHosts([f"http://{place}"]), f"http://{place}/hangs", seconds=0.2)


def test_an_answer_that_was_given_up_is_none(place: str) -> None:
    """A fetch that `abort` ended fails with a message, although the connection looks like an empty answer."""
    Files.asked.clear()
    bounds = HttpLimits(timeout=PATIENCE, private=networks_of(["127.0.0.1"]))
    exchange = HttpExchange(bounds, HttpTarget.of(f"http://{place}/hangs"))
    running = start_thread(exchange.run, "fetch")
    until(lambda: "/hangs" in Files.asked)
    exchange.abort()
    with pytest.raises(OutboundFailed, match="got no answer within"):
        running.result(PATIENCE)


def test_no_other_host_is_asked(place: str) -> None:
    """Images are fetched only from listed hosts, not from their subdomains, other ports or addresses, nor by http
    instead of https."""
    port = place.partition(":")[2]
    Files.asked.clear()
    for listed, url in (
        ("example.org", f"http://{place}/it.png"),
        (place, f"http://{place}/it.png"),
        (f"http://localhost:{port}=127.0.0.0/8", f"http://{place}/it.png"),
        (f"http://{place}", f"http://127.0.0.1:{int(port) ^ 1}/it.png"),
        ("example.org", "https://example.org.evil.test/it.png"),
        ("example.org", "https://a.example.org/it.png"),
    ):
        with pytest.raises(
            UnsupportedFeature, match=r"this server may not fetch from that host \(--allow-image-host\)"
        ):
            fetch(ImageHosts([listed]), url)
    with pytest.raises(MediaRefused, match="not public and not listed as private"):
        fetch(ImageHosts([f"http://localhost:{port}"]), f"http://localhost:{port}/it.png")
    assert Files.asked == []
    assert fetch(ImageHosts([f"http://localhost:{port}=127.0.0.0/8"]), f"http://localhost:{port}/it.png") == png()


@pytest.mark.parametrize(
    "listed", ["", "a b", "ftp://a.org", "a.org/pictures", "u@a.org", "a.org=x", "a.org=10.0.0.1/8", "*"]
)
def test_what_is_no_host_is_refused_at_the_start(listed: str) -> None:
    with pytest.raises(InvalidRequest, match="image_hosts has "):
        ImageHosts([listed])


def test_which_messages_have_pictures_to_fetch() -> None:
    def said(*parts: object) -> list[object]:
        return ["x", {"content": None}, {"content": "https://a/"}, {"content": [None, {"type": "text"}, *parts]}]

    assert not ImageHosts() and ImageHosts("example.org")
    assert has_remote(said({"type": "image_url", "image_url": {"url": "HTTPS://a/x.png"}}))
    assert has_remote(said({"type": "image", "source": {"type": "url", "url": "https://a/x.png"}}))
    for other in ({"image_url": {"url": "data:image/png;base64,AA"}}, {"file_id": "x"}, {"image_url": 3}, {}):
        assert not has_remote(said({"type": "image_url", **other}))
    assert not has_remote(said({"type": "image", "source": {"type": "base64", "data": "https://", "media_type": "x"}}))
