"""Client of a bridle server's API for the command line: address, requests, streams, and errors with a next step.

The module uses only the standard library, so that a client needs none of a server's packages. It prints nothing.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from cyclopts import Group, Parameter

from bridle.errors import BridleError, InvalidRequest

DEFAULT_BASE = "http://127.0.0.1:8080/v1/"
_BASE_VARIABLE = "AICI_API_BASE"
_TIMEOUT = 600.0  # seconds without a byte; an idle stream sends pings more often
_MAX_TRACE_BYTES = 256 << 20
_MAX_ERROR_BYTES = 1 << 20
_MAX_RETRY_AFTER = 60.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_SHOWN_BODY = 200
#: For an HTTP status of an error: the next step for a user of the command line.
_HINTS = {401: "; give one with --key, or with #key=KEY at the end of the address"}

SERVER = Group("Server", sort_key=20)


@Parameter(name="*", group=SERVER)
@dataclass(frozen=True, kw_only=True)
class Server:
    """Flags for the server to use and its API key."""

    base_url: Annotated[str | None, Parameter(name=["--base-url", "--url"])] = None
    "Address of the server; `#key=KEY` at the end adds a key. Default: AICI_API_BASE, or http://127.0.0.1:8080."
    key: str | None = None
    "API key for the server."

    def api(self) -> Api:
        """Return a client of the server's API."""
        return Api(self.base_url, self.key)


class ApiError(BridleError):
    """The server refused the request, or could not be reached. `retry_after` is the number of seconds after which to
    try again, if the server sent it."""

    code = "api_error"
    retry_after: float | None = None


class Api:
    """A client of a server's API. `base` is a URL that ends in `/v1/`, which is added if the URL has no path. A
    fragment `#key=K` of the URL is the API key."""

    def __init__(self, base: str | None = None, key: str | None = None) -> None:
        parts = urlsplit(base or os.environ.get(_BASE_VARIABLE) or DEFAULT_BASE)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = urlunsplit(parts)
            raise InvalidRequest(
                f"the base URL is {shown!r}; must be an http or https address such as {DEFAULT_BASE}", "base_url"
            )
        in_url = parts.fragment.removeprefix("key=") if parts.fragment.startswith("key=") else None
        path = "/v1/" if parts.path in ("", "/") else parts.path.removesuffix("/") + "/"
        self.base = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self.key = key or in_url
        self.request_id = ""  # id of the last run
        # Requests to this machine must not use a proxy from the environment.
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname in _LOOPBACK else []
        self._opener = urllib.request.build_opener(*proxies)

    def upload(self, wasm: bytes) -> dict[str, Any]:
        """Upload a Wasm module."""
        data: dict[str, Any] = self._json(self._request("controllers", wasm, "application/wasm"))
        return data

    def tag(self, module: str, tags: tuple[str, ...]) -> list[dict[str, Any]]:
        """Set tags as names of an uploaded module."""
        body = json.dumps({"module_id": module, "tags": list(tags)}).encode()
        found: list[dict[str, Any]] = self._json(self._request("controllers/tags", body))["tags"]
        return found

    def tags(self) -> list[dict[str, Any]]:
        """Return all tags, newest first."""
        found: list[dict[str, Any]] = self._json(self._request("controllers/tags"))["tags"]
        return found

    def status(self) -> dict[str, Any]:
        """Return the server's state from `GET /v1/status`."""
        data: dict[str, Any] = self._json(self._request("status"))
        return data

    def models(self) -> list[dict[str, Any]]:
        """Return the models and adapters that the server has loaded or could load."""
        data: dict[str, Any] = self._json(self._request("models"))
        return list(data.get("data", ()))

    def adapters(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return the LoRA adapters of a model (None: of all models)."""
        found: list[dict[str, Any]] = self._json(self._request("adapters" + _query(model)))["data"]
        return found

    def load_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load an adapter."""
        row: dict[str, Any] = self._json(self._request("adapters", json.dumps(body).encode()))
        return row

    def unload_adapter(self, name: str, model: str | None = None) -> None:
        """Remove an adapter."""
        request = self._request(f"adapters/{quote(name)}{_query(model)}")
        request.method = "DELETE"
        self._json(request)

    @contextmanager
    def run(self, body: dict[str, Any]) -> Iterator[Iterator[Any]]:
        """Run a controller. Yields the events of the stream as they arrive, and `None` for `[DONE]`. Leaving the
        context ends the run."""
        with self._open(self._request("run", json.dumps(body).encode())) as response:
            self.request_id = response.headers.get("x-request-id", "")
            yield _items(response)

    def trace(self, request_id: str) -> bytes:
        """Return the trace of a request as JSON lines."""
        with self._open(self._request(f"traces/{quote(request_id)}")) as response:
            return response.read(_MAX_TRACE_BYTES)

    def _request(self, path: str, body: bytes | None = None, kind: str = "application/json") -> urllib.request.Request:
        headers = {"Accept": "application/json, text/event-stream", "User-Agent": "bridle"}
        if body is not None:
            headers["Content-Type"] = kind
        if self.key:
            headers["api-key"] = self.key
        return urllib.request.Request(self.base + path, body, headers)  # noqa: S310  # http or https, checked above

    def _json(self, request: urllib.request.Request) -> Any:
        with self._open(request) as response:
            return json.load(response)

    @contextmanager
    def _open(self, request: urllib.request.Request) -> Iterator[HTTPResponse]:
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as response:
                yield response
        except urllib.error.HTTPError as error:
            refusal = ApiError(f"{_message(error)} (status {error.code}){_HINTS.get(error.code, '')}")
            refusal.retry_after = _seconds(error.headers.get("Retry-After"))
            raise refusal from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise ApiError(
                f"{self.base} cannot be reached: {reason}; start `bridle serve`, or give its URL with --base-url"
            ) from None
        except json.JSONDecodeError:
            raise ApiError(
                f"{self.base} does not answer like a bridle server; check the address of the server of the server"
            ) from None
        except (OSError, HTTPException) as error:
            raise ApiError(f"the connection to {self.base} broke: {error or type(error).__name__}") from None


def _query(model: str | None) -> str:
    return "" if model is None else "?" + urlencode({"model": model})


def _items(response: HTTPResponse) -> Iterator[Any]:
    for line in response:
        text = line.decode("utf-8", "replace").strip()
        if text == "data: [DONE]":
            yield None
        elif text.startswith("data:"):
            item = json.loads(text.removeprefix("data:"))
            if isinstance(item, dict) and "object" not in item and "error" in item:
                raise ApiError(_said(item) or "the server ended the run")
            yield item


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message of an error response, in any of the formats that such servers use."""
    body = error.read(_MAX_ERROR_BYTES).decode("utf-8", "replace").strip()
    try:
        said = _said(json.loads(body))
    except json.JSONDecodeError:
        said = None
    is_short = len(body) <= _MAX_SHOWN_BODY and not body.startswith("<")  # HTML pages are for browsers
    return said or (body if is_short else "") or str(error.reason)


def _seconds(text: str | None) -> float | None:
    """Return the seconds in a `Retry-After` header; None for a date, which bridle servers do not send."""
    return min(float(text), _MAX_RETRY_AFTER) if text is not None and text.isdecimal() else None


def _said(data: Any) -> str | None:
    if not isinstance(data, dict):
        return None
    error = data.get("error")
    for value in (data.get("message"), error.get("message") if isinstance(error, dict) else error, data.get("detail")):
        if isinstance(value, str) and value:
            return value
    return None
