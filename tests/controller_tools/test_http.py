"""HTTP as a tool: permitted requests, addresses that are connected to, and the error for every fault."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.controller_tools import Call, ToolExecutor
from bridle.controller_tools.functions import Threads
from bridle.controller_tools.http import HttpRule, HttpTool
from bridle.errors import InvalidRequest, ToolFailed
from bridle.safe_http import HttpLimits, HttpTarget, OutboundFailed, is_allowed, is_winding, networks_of
from bridle.safe_http.addresses import checked_address
from tests.waiting import PATIENCE, until

LOOPBACK = networks_of(["127.0.0.1"])


class Answers(BaseHTTPRequestHandler):
    """A small HTTP server whose paths tell it how to answer."""

    gate: ClassVar[threading.Event] = threading.Event()
    seen: ClassVar[list[tuple[str, str, str]]] = []

    def do_GET(self) -> None:
        self._note()
        path = self.path.partition("?")[0]
        match path:
            case "/api/hello":
                self._answer(200, "grün".encode(), {"Content-Type": "text/plain; charset=utf-8"})
            case "/api/latin":
                self._answer(200, "grün".encode("latin-1"), {"Content-Type": "text/plain; charset=iso-8859-1"})
            case "/api/odd":
                self._answer(200, b"x", {"Content-Type": "text/plain; charset=zlib_codec"})
            case "/api/huge":
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    try:
                        self.wfile.write(b"x" * (1 << 20))
                    except OSError:
                        return  # it was given up
            case "/api/away":
                self._answer(302, b"", {"Location": "http://169.254.169.254/latest"})
            case "/api/packed":
                self._answer(200, b"...", {"Content-Encoding": "gzip"})
            case "/api/hangs":
                self.gate.wait(PATIENCE)
            case "/api/half":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b"half")
            case _:
                self._answer(404, b"nothing here", {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._note(body.decode())
        self._answer(200, b"taken: " + body, {})

    def _note(self, body: str = "") -> None:
        self.seen.append((f"{self.command} {self.path}", self.headers.get("X-Key", ""), body))

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def service() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.server_address[1]
    Answers.gate.set()
    server.shutdown()
    server.server_close()
    thread.join()


def ask(port: int, arguments: dict[str, Any], **limits: Any) -> Call:
    rules = tuple(HttpRule.of(f"{method} http://localhost:{port}/api/") for method in ("GET", "POST"))
    bounds = HttpLimits(**{"private": LOOPBACK, "headers": {"X-Key": "secret"}, **limits})
    threads = Threads(4)
    desk = ToolExecutor({"web": HttpTool(rules, bounds, threads)})
    try:
        call = desk.begin("web", arguments)
        until(lambda: call.is_done)
        until(lambda: threads.num == 0)  # no thread outlives its call by much
        return call
    finally:
        desk.close()


def url(port: int, path: str) -> dict[str, Any]:
    return {"url": f"http://localhost:{port}{path}"}


def test_answers_are_texts(service: int) -> None:
    assert ask(service, url(service, "/api/hello?x=%20y")).text == "grün"
    assert ("GET /api/hello?x=%20y", "secret", "") in Answers.seen
    assert ask(service, url(service, "/api/latin")).text == "grün"
    assert ask(service, url(service, "/api/odd")).text == "x"


def test_a_body_is_text_or_json(service: int) -> None:
    assert ask(service, url(service, "/api/put") | {"method": "POST", "body": {"a": 1}}).text == 'taken: {"a":1}'
    assert ask(service, url(service, "/api/put") | {"method": "POST", "body": "plain"}).text == "taken: plain"


@pytest.mark.parametrize(
    ("path", "limits", "why"),
    [
        ("/api/absent", {}, "localhost answered with status 404: nothing here"),
        ("/api/away", {}, "localhost answered with status 302"),
        ("/api/huge", {"max_bytes": 1000}, "the answer has more than 1000 bytes (max_bytes)"),
        ("/api/packed", {}, "the answer has the content encoding 'gzip'"),
        ("/api/hangs", {"timeout": 0.05}, "did not answer within 0.05 seconds (timeout)"),
        ("/api/half", {}, "the request to localhost failed: IncompleteRead"),
        ("/api/hello", {"private": ()}, "which is not public and not listed as private"),
        ("/other", {}, "is not allowed"),
    ],
)
def test_faults_are_told(service: int, path: str, limits: dict[str, Any], why: str) -> None:
    error = ask(service, url(service, path), **limits).error
    assert error is not None and why in error


def test_a_refused_connection_is_an_error(service: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        port = taken.getsockname()[1]
        error = ask(port, url(port, "/api/x")).error
    assert error is not None and "the request to localhost failed: ConnectionRefusedError" in error


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "url is None"),
        ({"url": "http://x/", "verb": "GET"}, "the arguments have a field 'verb'; known are method, url"),
        ({"url": "http://localhost:1/api/", "method": "TRACE"}, "method is 'TRACE'; must be one of GET"),
        ({"url": "http://localhost:1/api/", "content_type": "a\r\nX: y"}, "content_type is"),
        ({"url": "ftp://localhost/"}, "must be http or https"),
        ({"url": "http://me@localhost/"}, "without user info"),
        ({"url": "http://localhost/a b"}, "printable ASCII"),
        ({"url": "http://localhost/\r\nX: y"}, "printable ASCII"),
        ({"url": "http://localhost/ü"}, "printable ASCII"),
        ({"url": "http://localhost\\@evil/"}, "printable ASCII"),
        ({"url": "http://localhost:99999/"}, "url is 'http://localhost:99999/': "),
        ({"url": "http://[::1]/"}, "its host must be a name or an IPv4 address"),
        ({"url": "http://localhost/api/../secret"}, "the parts '.' and '..'"),
        ({"url": "http://localhost/api/%2e%2e/secret"}, "the parts '.' and '..'"),
        ({"url": "http://localhost/api/..;x/secret"}, "the parts '.' and '..'"),
        ({"url": "http://localhost/api%2fsecret"}, "encoded slashes"),
        ({"url": "http://localhost/api/%252e%252e/secret"}, "encoded slashes"),
        ({"url": "http://localhost/api/..%5csecret"}, "encoded slashes"),
    ],
)
def test_what_is_no_good_request_goes_nowhere(service: int, arguments: dict[str, Any], why: str) -> None:
    before = len(Answers.seen)
    error = ask(service, arguments).error
    assert error is not None and why in error
    assert len(Answers.seen) == before


def test_a_call_that_is_given_up_ends_its_connection(service: int) -> None:
    rule, threads = HttpRule.of(f"GET http://localhost:{service}/api/"), Threads(1)
    desk = ToolExecutor({"web": HttpTool((rule,), HttpLimits(private=LOOPBACK, timeout=PATIENCE), threads)})
    call = desk.begin("web", url(service, "/api/hangs"), timeout=PATIENCE)
    until(lambda: threads.num)
    call.cancel()
    until(lambda: threads.num == 0)  # long before the time is up
    assert call.error == "was cancelled"
    desk.close()


def test_a_look_up_that_hangs_keeps_its_thread_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name look-up that hangs cannot be stopped. The tool call ends in time. Its thread counts as used until the
    look-up returns, and then connects to no server."""
    gate, real = threading.Event(), socket.getaddrinfo
    connected: list[Any] = []

    def resolve(host: Any, *rest: Any, **options: Any) -> list[Any]:
        if host == "hangs.example":
            gate.wait(PATIENCE)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]
        return list(real(host, *rest, **options))

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr("socket.create_connection", lambda *rest: connected.append(rest))
    rule, threads = HttpRule.of("GET http://hangs.example/"), Threads(1)
    desk = ToolExecutor({"web": HttpTool((rule,), HttpLimits(private=LOOPBACK, timeout=0.05), threads)})
    try:
        for why in (
            "the HTTP server did not answer within 0.05 seconds (timeout)",
            "1 tool functions are running; at most 1 may run (max_threads)",
        ):
            call = desk.begin("web", {"url": "http://hangs.example/"})
            until(partial(getattr, call, "is_done"))
            assert call.error == why
        assert threads.num == 1
        gate.set()
        until(lambda: threads.num == 0)
        assert not connected
    finally:
        gate.set()
        desk.close()


def test_a_thread_that_is_given_up_before_it_begins_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    class Late(threading.Thread):
        def start(self) -> None:
            begun.append(self)

    threads, ran = Threads(1), []
    monkeypatch.setattr("bridle.threads.threading.Thread", Late)
    future = threads.start(lambda: ran.append(1), "late")
    assert threads.num == 1 and future.cancel() and threads.num == 0
    begun[0].run()
    assert not ran and threads.num == 0

    class Never(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("bridle.threads.threading.Thread", Never)
    with pytest.raises(ToolFailed, match="the system started no thread for the function: can't start new thread"):
        threads.start(lambda: None, "none")
    assert threads.num == 0


# -- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "request_", "is_allowed_"),
    [
        ("GET https://a.org/api/", "https://a.org/api/x", True),
        ("GET https://a.org/api/", "https://A.org:443/api/", True),
        ("GET https://a.org/api", "https://a.org/api", True),
        ("GET https://a.org/api", "https://a.org/api/x?y", True),
        ("GET https://a.org/api", "https://a.org/apix", False),
        ("GET https://a.org/api/", "https://a.org/api", False),
        ("GET https://a.org/", "http://a.org/", False),
        ("GET https://a.org/", "https://a.org:444/", False),
        ("GET https://a.org/", "https://a.org.evil.org/", False),
        ("POST https://a.org/", "https://a.org/", False),
    ],
)
def test_a_rule_allows_what_it_names_and_nothing_else(rule: str, request_: str, is_allowed_: bool) -> None:
    assert HttpRule.of(rule).allows("GET", HttpTarget.of(request_)) is is_allowed_


@pytest.mark.parametrize(
    "text", ["https://a.org/", "get https://a.org/", "GET a.org", "GET https://a.org/?x", "GET", 3]
)
def test_rules_are_checked(text: Any) -> None:
    with pytest.raises(InvalidRequest, match="allow has "):
        HttpRule.of(text)


@given(
    parts=st.lists(
        st.sampled_from(["a", "..", ".", "%2e", "%2E.", "%2f", "\\", "%5c", "b;x", "..;y", "%25"]), max_size=5
    )
)
def test_no_path_leads_out_of_its_prefix(parts: list[str]) -> None:
    """However a server interprets an accepted path, the result stays below the permitted prefix."""
    from posixpath import normpath
    from urllib.parse import unquote

    path = "/api/" + "/".join(parts)
    if not is_winding(path):
        read = unquote(unquote(path)).replace("\\", "/")
        assert (normpath(read) + "/").startswith("/api/")


# -- addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "192.168.0.1",
            "172.16.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe", "::ffff:10.0.0.1", "240.0.0.1"),
    ],
)
def test_private_addresses_are_refused(address: str) -> None:
    assert not is_allowed(ip_address(address), ())


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed(ip_address(address), ())


def test_listed_addresses_are_allowed() -> None:
    listed = networks_of(["10.0.0.0/8", "::1"])
    assert is_allowed(ip_address("10.9.8.7"), listed)
    assert is_allowed(ip_address("::1"), listed)
    assert is_allowed(ip_address("::ffff:10.9.8.7"), listed)
    assert not is_allowed(ip_address("127.0.0.1"), listed)
    with pytest.raises(InvalidRequest, match="private: "):
        networks_of(["10.0.0.1/8"])


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked address is returned, so that the name is not looked up again."""
    asked: list[str] = []

    def resolve(host: str, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        found = {"both": ["1.1.1.1", "127.0.0.1"], "good": ["1.1.1.1", "2606:4700::1111"], "none": []}[host]
        return [(0, 0, 0, "", (address, port)) for address in found]

    monkeypatch.setattr("bridle.safe_http.addresses.socket.getaddrinfo", resolve)
    assert checked_address("good", 443, ()) == "1.1.1.1"
    with pytest.raises(OutboundFailed, match=r"host 'both' has the address 127.0.0.1, which is not public"):
        checked_address("both", 443, ())
    with pytest.raises(OutboundFailed, match="host 'none' has no address"):
        checked_address("none", 443, ())
    assert asked == ["good", "both", "none"]


def test_the_connection_goes_to_the_address_that_was_checked(service: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up of the name gives another address, but only the first address is used."""
    answers = iter(["127.0.0.1", "192.0.2.1", "192.0.2.2"])
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **options: Any) -> list[Any]:
        if host == "rebinds.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]
        return list(real(host, port, *rest, **options))

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    rule = HttpRule.of(f"GET http://rebinds.example:{service}/")
    desk = ToolExecutor({"web": HttpTool((rule,), HttpLimits(private=LOOPBACK), Threads(1))})
    call = desk.begin("web", {"url": f"http://rebinds.example:{service}/api/hello"})
    until(lambda: call.is_done)
    desk.close()
    assert call.text == "grün"
    assert next(answers) == "192.0.2.1"  # one look-up
