"""A server without keys answers only to host names that nobody else can own. A web page under another name gets no
answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from bridle.errors import InvalidRequest, Unauthorized
from bridle.http import HttpSettings, ServeSettings, create_app
from bridle.http.middleware.trusted_hosts import AllowedHosts
from bridle.lmtp.server import websocket_front
from bridle.serving import ModelRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import served
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE

KNOWN = [
    "localhost",
    "LOCALHOST:8080",
    "a.localhost",
    "127.0.0.1:8080",
    "127.1.2.3",
    "[::1]:8080",
    "[::1]",
    "10.0.0.7:80",
]
KNOWN += ["models.example:8080", "Models.Example.", "a.b.example", "a.example:1"]
STRANGE = ["evil.example.org", "models.example.org", "localhost.example.org", "xexample", "127.0.0.1.example.org:80"]
STRANGE += ["localhost@evil.example.org", "evil.example.org:8080:80", "127.0.0.1x", "0x7f000001"]
HOSTS = AllowedHosts(["models.example", ".example"])


@pytest.mark.parametrize("host", [*KNOWN, None, ""])
def test_names_that_nobody_else_can_own_are_answered(host: str | None) -> None:
    HOSTS.check(host)


@pytest.mark.parametrize("host", STRANGE)
def test_other_names_are_not(host: str) -> None:
    with pytest.raises(Unauthorized, match="--allowed-host"):
        HOSTS.check(host)


@given(st.text(max_size=12))
def test_any_header_is_decided(host: str) -> None:
    """Any host header is a known name, an IP address, or refused with `Unauthorized`. No other error is raised."""
    try:
        AllowedHosts(["models.example"]).check(host)
    except Unauthorized:
        return
    plain = host.strip().lower()
    ends = ("localhost", "models.example", "")
    assert plain.split(":")[0].rstrip(".").endswith(ends)


def test_a_star_is_any() -> None:
    AllowedHosts(["*"]).check("evil.example.org")


@pytest.mark.parametrize("name", ["", "a/b", "http://a", "name:8080"])
def test_names_are_names(name: str) -> None:
    with pytest.raises(InvalidRequest, match="allowed_host"):
        HttpSettings(allowed_hosts=(name,))


def test_the_address_that_is_listened_on_is_allowed() -> None:
    settings = ServeSettings(host="box.lan", http=HttpSettings(allowed_hosts=("models.example",)))
    AllowedHosts(settings.http.answering_to(settings.host).allowed_hosts or ()).check("box.lan:8080")


# -- on the wire ---------------------------------------------------------------------------------------------


def rebound() -> dict[str, str]:
    """Return a browser's headers for a page of `evil.example.org`, if this name resolves to the server's address (DNS
    rebinding)."""
    return {"host": "evil.example.org:8080", "origin": "http://evil.example.org:8080"}


def test_a_page_behind_a_strange_name_gets_nothing_on_any_route() -> None:
    app = create_app(ModelRegistry([fake_model()]), HttpSettings(allowed_hosts=()))
    client = TestClient(app)
    for path in [*app.openapi()["paths"], "/", "/nope", "/docs", "/openapi.json"]:
        if path.startswith("/health") or path == "/ping":
            continue
        for method in ("GET", "POST"):
            answer = client.request(method, path, headers=rebound())
            assert answer.status_code == 403, path
            assert "evil.example.org" in str(answer.json()["error"])


def test_an_upload_is_not_taken_from_there() -> None:
    """The upload route, which accepts any content type, checks the host name, too."""
    client = TestClient(create_app(ModelRegistry([fake_model()]), HttpSettings(allowed_hosts=())))
    answer = client.post("/v1/controllers", content=b"\0asm", headers=rebound())
    assert answer.status_code == 403


def test_a_websocket_is_not_opened_from_there() -> None:
    with served(fake_model(), HttpSettings(allowed_hosts=()), fronts=[websocket_front()]) as url:
        address = url.replace("http://", "ws://") + "/lmtp"
        with connect(address, additional_headers={"origin": url}, open_timeout=PATIENCE):
            pass
        with pytest.raises(InvalidStatus) as refusal:
            connect(address, additional_headers=rebound(), open_timeout=PATIENCE)
    assert refusal.value.response.status_code == 403
    assert b"evil.example.org" in (refusal.value.response.body or b"")


def test_with_keys_the_key_decides(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    client = TestClient(create_app(ModelRegistry([fake_model()]), HttpSettings(allowed_hosts=()), keys))
    assert client.get("/v1/models", headers=rebound()).status_code == 401
    headers = {"host": "models.example.org", "authorization": f"Bearer {keys.add('ann')}"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    keys.close()


def test_a_trusted_proxy_may_pass_any_name_on() -> None:
    settings = HttpSettings(allowed_hosts=(), trusted_proxies=("10.0.0.0/8",))
    client = TestClient(create_app(ModelRegistry([fake_model()]), settings), client=("10.0.0.1", 1))
    named = {"host": "models.example.org", "x-user-id": "ann"}
    assert client.get("/v1/models", headers=named).status_code == 200
    assert client.get("/v1/models", headers={"host": "models.example.org"}).status_code == 403
