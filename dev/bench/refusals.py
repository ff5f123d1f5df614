"""Benchmark of malicious request bodies: the seconds until the server refuses them, and the delay of other requests.

Every route of `bridle serve` that takes a body gets values that are large, deep or not numbers. Each value is sent as a
whole body and in a field, up to the body limit of 4 MiB and beyond. Meanwhile another client repeats the request
`/health/live` on its own connection. The longest wait of this client, minus its usual wait, is the time for which the
server answered no other request.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.load_report import quantile
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.serve_process import HttpServer, http_server
from bridle.bench.settings import BenchSettings
from bridle.bench.sse_client import ServerTarget
from tests.fakes.hostile_json import hostile_values

if TYPE_CHECKING:
    from rich.console import Console

_BODY_BYTES = (4 << 20) - 256
_GIGABYTE = 1 << 30
_PAUSE = 0.001
_RAW = "requests that are none"
#: Rough seconds for `MachineLimits.python`: bodies over all routes and their fields, one body, and a byte of a body.
_NUM_BODIES, _REQUEST_SECONDS, _BYTE_SECONDS, _RAW_SECONDS = 120, 3e-3, 1e-9, 1.0
_GOOD = {
    "prompt": "a",
    "inputs": "a",
    "input": "a",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
    "controller": "none",
    "controller_arg": "",
    "module_id": "f",
    "tags": ["a"],
    "model": "demo",
}
#: Fields in which a value is sent, in addition to whole bodies: fields for which the server does the most work before a
#: refusal.
_FIELDS = ("prompt", "inputs", "input", "messages", "stop", "logit_bias", "tools", "response_format", "choice", "n")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Results of one kind of malicious value on all routes. Times are in seconds: the slowest refusal with its route,
    the most processor time for one request, and the other client's longest wait. `served` counts valid requests, on
    routes that ignore unknown fields; their times include the time of generating.
    """

    kind: str
    requests: int
    served: int
    statuses: str
    slowest: float
    route: str
    work: float
    bystander: float


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Send all malicious bodies, and print a table."""
    with (
        tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder,
        http_server("demo", Path(folder), "--kv-memory", "64MiB", threads=settings.threads) as server,
    ):
        routes = _routes(server.target)
        values = _values(settings, _BODY_BYTES)
        bystander = Bystander(server.target)
        usual = bystander.usual()
        kinds: dict[str, Mapping[str, bytes]] = {name: _bodies(routes, value) for name, value in values.items()}
        refusals = []
        for name, bodies in kinds.items():
            with phases.part(name):
                refusals.append(_try(server, name, bodies, bystander, usual))
        with phases.part(_RAW):
            refusals += [
                _send_all(server, name, {"/v1/completions": raw}, bystander, usual)
                for name, raw in _raw_requests().items()
            ]
        bystander.close()
    _print(refusals, usual, console)
    return {"usual_wait": usual, "refusals": [asdict(each) for each in refusals]}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each kind of value on all routes, in which the server reads or refuses the
    largest value."""
    return {
        name: limits.python(_NUM_BODIES * (_REQUEST_SECONDS + _BODY_BYTES * _BYTE_SECONDS))
        for name in _values(settings, 1)
    } | {_RAW: limits.python(_RAW_SECONDS)}


def _values(settings: BenchSettings, num_bytes: int) -> Mapping[str, bytes]:
    values = hostile_values(num_bytes)
    if not settings.quick:
        return values
    return {name: values[name] for name in ("lists", "names", "texts", "numbers", "text", "deep lists", "NaN")}


def _routes(target: ServerTarget) -> dict[str, dict[str, Any]]:
    """Return the routes that accept JSON, each with the schema of its body."""
    with urllib.request.urlopen(f"http://{target.host}:{target.port}/openapi.json", timeout=60) as answer:
        description = json.load(answer)
    routes = {}
    for path, methods in description["paths"].items():
        operation = methods.get("post")
        if operation is None:
            continue
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        name = content.get("schema", {}).get("$ref", "").rsplit("/", 1)[-1]
        routes[path] = description["components"]["schemas"].get(name, {"properties": _GOOD})
    return routes


def _bodies(routes: Mapping[str, Mapping[str, Any]], value: bytes) -> dict[str, bytes]:
    """Return the bodies that contain `value`, as the whole body or in one field, by `route field`."""
    bodies = {}
    for path, schema in routes.items():
        bodies[path] = value
        for field in _FIELDS:
            if field in schema["properties"]:
                good = {name: good for name, good in _GOOD.items() if name in schema["properties"] and name != field}
                head = json.dumps(good)[:-1] + (", " if good else "")
                bodies[f"{path} {field}"] = f'{head}"{field}": '.encode() + value + b"}"
    return bodies


def _raw_requests() -> dict[str, bytes]:
    """Return requests that are invalid before their body is read: long heads, and bodies of a gigabyte, announced or in
    chunks."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    return {
        "1 MB header": post + b"X-Long: " + b"a" * 1_000_000 + b"\r\n\r\n",
        "20,000 headers": post + b"".join(b"X-%d: a\r\n" % number for number in range(20_000)) + b"\r\n",
        "1 GB announced": post + b"Content-Length: %d\r\n\r\n" % _GIGABYTE + b" " * 4096,
        "1 GB in chunks": post + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 8,  # cut long before the end
    }


# -- one request ---------------------------------------------------------------------------------------------


def _try(server: HttpServer, kind: str, bodies: Mapping[str, bytes], bystander: Bystander, usual: float) -> Refusal:
    raw = {}
    for name, body in bodies.items():
        head = (
            f"POST {name.partition(' ')[0]} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        raw[name] = head.encode() + body
    return _send_all(server, kind, raw, bystander, usual)


def _send_all(
    server: HttpServer, kind: str, requests: Mapping[str, bytes], bystander: Bystander, usual: float
) -> Refusal:
    statuses: set[int] = set()
    times, work, served = {}, 0.0, 0
    with bystander.watching() as waits:
        for name, request in requests.items():
            cpu, begin = server.cpu_seconds, time.perf_counter()
            status = _send(server.target, request)
            statuses.add(status)
            if status == 200:
                served += 1
                continue
            times[name] = time.perf_counter() - begin
            work = max(work, server.cpu_seconds - cpu)
    route = max(times, key=times.__getitem__, default="")
    shown = " ".join(map(str, sorted(statuses)))
    wait = max(max(waits, default=0.0) - usual, 0.0)
    return Refusal(kind, len(requests), served, shown, times.get(route, 0.0), route, work, wait)


def _send(target: ServerTarget, request: bytes) -> int:
    """Send a request; return the status of the answer. The server may close the connection before it has read the whole
    request."""
    with socket.create_connection((target.host, target.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(4096)
            return int(answer[9:12]) if answer else 0
    return 0


class Bystander:
    """A well-behaved client that sends small requests frequently."""

    def __init__(self, target: ServerTarget) -> None:
        self._connection = socket.create_connection((target.host, target.port), timeout=60)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def wait(self) -> float:
        """Send a request, and return the seconds until its answer."""
        begin = time.perf_counter()
        self._connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        self._connection.recv(4096)
        return time.perf_counter() - begin

    def usual(self) -> float:
        """Return the median wait while the server has no other requests."""
        return quantile([self.wait() for _ in range(200)], 50)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[float]]:
        """Within the block, send requests in a thread; yield the list of waits."""
        waits: list[float] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                waits.append(self.wait())
                over.wait(_PAUSE)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        try:
            yield waits
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _print(refusals: list[Refusal], usual: float, console: Console) -> None:
    from rich.table import Table

    table = Table(
        "body",
        "requests",
        "served",
        "status",
        "slowest refusal",
        "on",
        "work",
        "others wait",
        caption=f"usual wait: {usual * 1e3:.1f} ms",
    )
    for each in refusals:
        table.add_row(
            each.kind,
            str(each.requests),
            str(each.served),
            each.statuses,
            f"{each.slowest * 1e3:.0f} ms",
            each.route,
            f"{each.work * 1e3:.0f} ms",
            f"{each.bystander * 1e3:.0f} ms",
        )
    console.print(table)
