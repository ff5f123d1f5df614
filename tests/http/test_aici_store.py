"""Tests of uploads and tags of controllers on a server: rights of users, refused requests, and storage limits."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from structlog.testing import capture_logs

from bridle.http import HttpSettings
from bridle.serving import LoadedModel
from bridle.serving.tenancy.keys import KeyStore
from tests.aici.guests import END, guest2
from tests.http.controlled import Client, controlled_model, joined, lent, pick, text_of
from tests.http.harness import scripted_model, served
from tests.serving.fakes import fake_model
from tests.waiting import PATIENCE, until

WASM = guest2([pick("a"), END])
OTHER = guest2([pick("b"), END])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with controlled_model(tmp_path_factory.mktemp("store")) as model:
        yield model


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyStore]:
    store = KeyStore(tmp_path_factory.mktemp("keys") / "keys.db")
    yield store
    store.close()


@pytest.fixture(scope="module")
def url(model: LoadedModel) -> Iterator[str]:
    """Yield the address of a server without keys, on which every client is the local admin."""
    with served(lent(model)) as url:
        yield url


@pytest.fixture(scope="module")
def keyed(model: LoadedModel, keys: KeyStore) -> Iterator[str]:
    """Serve the same model to users with keys."""
    with served(lent(model), keys=keys) as url:
        yield url


@pytest.fixture(scope="module")
def proxied(model: LoadedModel) -> Iterator[str]:
    """Yield the address of a server of the same model behind a proxy on this machine."""
    with served(lent(model), HttpSettings(trusted_proxies=("127.0.0.1",))) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    client = Client(url)
    yield client
    client.close()


@pytest.fixture
def alice(keyed: str, keys: KeyStore) -> Iterator[Client]:
    client = Client(keyed, authorization=f"Bearer {keys.add('alice')}")
    yield client
    client.close()


@pytest.fixture
def admin(keyed: str, keys: KeyStore) -> Iterator[Client]:
    client = Client(keyed, **{"api-key": keys.add("root", is_admin=True)})
    yield client
    client.close()


def test_an_upload_can_be_run_and_repeated(client: Client) -> None:
    answer = client.http.post("/v1/controllers", content=WASM)
    assert answer.status_code == 200
    data = answer.json()
    assert set(data) == {"module_id", "wasm_size", "compiled_size", "time"}
    assert data["wasm_size"] == len(WASM) and data["compiled_size"] > 0 and len(data["module_id"]) == 64
    again = client.http.post("/v1/controllers", content=WASM).json()
    assert again["module_id"] == data["module_id"]
    assert text_of(client.run(data["module_id"], prompt="x")) == "a"


def test_a_tag_names_a_module_until_it_is_moved(client: Client) -> None:
    first, second = client.upload(WASM), client.upload(OTHER)
    answer = client.tag(first, "tagged-1", "tagged-2")
    assert answer.status_code == 200
    (one, two) = answer.json()["tags"]
    assert set(one) == {"tag", "module_id", "updated_at", "updated_by", "wasm_size", "compiled_size"}
    assert (one["tag"], two["tag"], one["module_id"], one["updated_by"]) == ("tagged-1", "tagged-2", first, "localhost")
    assert text_of(client.run("tagged-1", prompt="x")) == "a"
    client.tag(second, "tagged-1").raise_for_status()
    assert text_of(client.run("tagged-1", prompt="x")) == "b"
    listed = [info["tag"] for info in client.http.get("/v1/controllers/tags").json()["tags"]]
    assert listed[0] == "tagged-1" and "tagged-2" in listed  # newest first


@pytest.mark.parametrize("tag", ["", "1abc", "a b", "x" * 51, "a" * 21, "a/b", "é"])
def test_wrong_tags_are_refused(client: Client, tag: str) -> None:
    answer = client.tag(client.upload(WASM), tag)
    assert answer.status_code == 400
    assert "invalid tag" in answer.json()["message"]


def test_tags_need_a_module(client: Client) -> None:
    assert client.tag("f" * 64, "fine").status_code == 400
    assert client.tag("x" * 1000, "fine").status_code == 400
    assert client.tag(client.upload(WASM), *(f"t{i}" for i in range(100))).status_code == 400
    assert client.post("/v1/controllers/tags", tags=["fine"]).status_code == 400


def test_users_set_their_own_tags_and_admins_any(alice: Client, admin: Client) -> None:
    module = alice.upload(WASM)
    assert alice.tag(module, "alice.mine").json()["tags"][0]["updated_by"] == "alice"
    for tag in ("mine", "bob.tag", "alice", "alicex.tag"):
        refused = alice.tag(module, tag)
        assert refused.status_code == 400
        assert "may only set tags that start with 'alice.'" in refused.json()["message"]
    assert alice.tag(module, "alice.other", "mine").status_code == 400
    listed = [info["tag"] for info in alice.http.get("/v1/controllers/tags").json()["tags"]]
    assert "alice.mine" in listed and "alice.other" not in listed  # all or none
    for tag in ("mine", "bob.tag", "root.tag"):
        assert admin.tag(module, tag).status_code == 200
    assert text_of(alice.run("mine", prompt="x")) == "a"


def test_without_a_key_nothing_is_told(keyed: str) -> None:
    with httpx.Client(base_url=keyed) as nobody:
        for headers in ({}, {"api-key": "wrong"}, {"x-user-id": "root", "x-user-role": "admin"}):
            assert nobody.post("/v1/controllers", content=WASM, headers=headers).status_code == 401
            assert nobody.get("/v1/controllers/tags", headers=headers).status_code == 401
            assert nobody.post("/v1/run", json={}, headers=headers).status_code == 401


def test_user_headers_count_only_from_a_trusted_proxy(url: str, proxied: str) -> None:
    carol = {"x-user-id": "carol", "x-user-role": "user"}
    for base, is_believed in ((url, False), (proxied, True)):
        client = Client(base, **carol)
        module = client.upload(WASM)
        own = client.tag(module, "carol.tag").json()["tags"][0]
        assert own["updated_by"] == ("carol" if is_believed else "localhost")
        assert client.tag(module, "anything").status_code == (400 if is_believed else 200)
        client.close()
    chief = Client(proxied, **(carol | {"x-user-role": "admin"}))
    assert chief.tag(chief.upload(WASM), "anything").json()["tags"][0]["updated_by"] == "carol"
    too_long = chief.http.get("/v1/controllers/tags", headers={"x-user-id": "c" * 101})
    assert too_long.status_code == 401
    chief.close()


def test_nobody_becomes_a_proxy_by_saying_so(model: LoadedModel) -> None:
    with served(lent(model), HttpSettings(trusted_proxies=("10.0.0.1",))) as url:
        headers = {"x-forwarded-for": "10.0.0.1", "x-user-id": "carol", "x-user-role": "admin"}
        client = Client(url, **headers)
        assert client.tag(client.upload(WASM), "carol.tag").json()["tags"][0]["updated_by"] == "localhost"
        client.close()


@pytest.mark.parametrize(
    ("body", "word"),
    [(b"", "empty"), (b"not wasm", ""), (WASM[:100], ""), (b"\0asm\1\0\0\0", "controller")],
)
def test_what_is_no_controller_is_refused(client: Client, body: bytes, word: str) -> None:
    answer = client.http.post("/v1/controllers", content=body)
    if answer.status_code == 200:  # a valid module; that it is no controller shows when it is run
        module = answer.json()["module_id"]
        answer = client.post("/v1/run", controller=module, controller_arg="", prompt="x")
    assert answer.status_code == 400, answer.text
    assert answer.json()["message"] == answer.json()["error"]["message"] and word in answer.json()["message"]


def test_a_module_that_is_too_large_is_refused_unread(url: str) -> None:
    where = urlsplit(url)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE)
    connection.putrequest("POST", "/v1/controllers")
    connection.putheader("content-length", str(200 << 20))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413 and b"too large" in answer.read()
    connection.close()


def test_a_module_that_grows_too_large_is_cut(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.http.aici.routes.MAX_MODULE_BYTES", 100_000)

    def chunks() -> Iterator[bytes]:
        yield b"\0asm\1\0\0\0"
        for _ in range(100):
            yield bytes(10_000)

    with served(lent(model)) as url:
        client = Client(url)
        assert client.http.post("/v1/controllers", content=chunks()).status_code == 413
        client.close()


@contextlib.contextmanager
def upload_under_way(url: str) -> Iterator[None]:
    """Start an upload whose body the route waits for. The client disconnects at the end."""
    where = urlsplit(url)
    assert where.hostname is not None
    slow = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE)
    slow.putrequest("POST", "/v1/controllers")
    slow.putheader("content-length", str(len(WASM)))
    slow.putheader("expect", "100-continue")
    slow.endheaders()
    with slow.sock.makefile("rb") as told:  # the server asks for the body when the route reads it
        assert b"100" in told.readline()
    yield
    slow.close()


def test_few_uploads_at_a_time(model: LoadedModel) -> None:
    with served(lent(model), HttpSettings(max_uploads=1)) as url, upload_under_way(url):
        refused = httpx.post(f"{url}/v1/controllers", content=WASM, timeout=PATIENCE)
        assert refused.status_code == 429 and "retry-after" in refused.headers


def test_a_client_that_disconnects_during_an_upload_is_no_bug(model: LoadedModel) -> None:
    with served(lent(model)) as url, capture_logs() as lines:
        with upload_under_way(url):
            pass
        ended = until(lambda: [line for line in lines if line["event"] == "request"], "a line about the upload")
    assert [line["status"] for line in ended] == [499], lines


def test_slow_uploads_are_given_up(model: LoadedModel) -> None:
    with served(lent(model), HttpSettings(receive_timeout=0.05)) as url:
        where = urlsplit(url)
        assert where.hostname is not None
        status = 0
        while not status:  # a head that is late itself, on a busy machine, is not answered
            slow = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE)
            slow.putrequest("POST", "/v1/controllers")
            slow.putheader("content-length", "1000")
            with contextlib.suppress(ConnectionError):
                slow.endheaders()
                status = slow.getresponse().status
            slow.close()
        assert status == 408


def test_pages_from_elsewhere_may_not_upload(url: str, model: LoadedModel) -> None:
    host = urlsplit(url).netloc
    page = "http://page.example"
    assert httpx.post(url + "/v1/controllers", content=WASM, headers={"origin": page}).status_code == 403
    assert httpx.post(url + "/v1/controllers", content=WASM, headers={"origin": "null"}).status_code == 403
    assert httpx.post(url + "/v1/controllers", content=WASM, headers={"origin": f"http://{host}"}).status_code == 200
    with served(lent(model), HttpSettings(cors_origins=(page,))) as open_url:
        answer = httpx.post(open_url + "/v1/controllers", content=WASM, headers={"origin": page})
        assert answer.status_code == 200


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/controllers", {"content": WASM}),
    ("GET", "/v1/controllers/tags", {}),
    ("POST", "/v1/controllers/tags", {"json": {"module_id": "f" * 64, "tags": ["a"]}}),
    ("POST", "/v1/run", {"json": {"controller": "x", "controller_arg": ""}}),
    ("POST", "/v1/completions", {"json": {"prompt": "a", "controller": "x"}}),
]


def test_without_a_runtime_controllers_are_not_there() -> None:
    with served(scripted_model()) as url:
        for method, path, options in CALLS:
            answer = httpx.request(method, url + path, **options)
            assert answer.status_code == (400 if path == "/v1/completions" else 501)
            assert "without a control runtime" in answer.json()["error"]["message"]
        client = Client(url)
        assert client.run("none", "hello", max_tokens=2)[-1] == "[DONE]"
        client.close()


class Broken:
    """A control runtime that is not running."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def call(self, request: object, data_type: object) -> Any:
        from bridle.errors import ControllerUnavailable

        raise ControllerUnavailable("the control runtime is not running")


def test_a_runtime_that_is_down_is_no_fault_of_the_client(model: LoadedModel) -> None:
    fake = fake_model()
    assert model.control is not None
    fake.control = Broken(model.control.config)  # type: ignore[assignment]
    with served(fake) as url:
        for method, path, options in CALLS[:3]:
            answer = httpx.request(method, url + path, **options)
            assert answer.status_code == 500
            assert "not running" in answer.json()["message"]


def test_modules_survive_a_server(model: LoadedModel, tmp_path: Path) -> None:
    with controlled_model(tmp_path) as first, served(first) as url:
        client = Client(url)
        module = client.upload(WASM)
        client.tag(module, "kept").raise_for_status()
        client.close()
    with controlled_model(tmp_path) as second, served(second) as url:
        client = Client(url)
        assert text_of(client.run("kept", prompt="x")) == "a"
        assert joined(client.run(module, prompt="x"), "error") == ""
        client.close()
