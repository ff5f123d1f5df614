"""Resolves `gh:` references to controllers: finds the release asset on GitHub, and downloads it if the operator allows
that.

Without permission to download, only bridle's own controllers and earlier downloads are found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bridle.aici.protocol import Auth
from bridle.aici.replies import ModuleData
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.modules import ModuleStore
from bridle.aici.runtime.tags import GhReference
from bridle.errors import InvalidRequest

#: Seconds for which release metadata is used before it is read again.
FRESH = 120.0
_TIMEOUT = 30.0
_MAX_METADATA = 8 << 20

Fetch = Callable[[str, dict[str, str], int], bytes]
Install = Callable[[bytes, Auth], ModuleData]


class _Asset(msgspec.Struct):
    name: str
    url: str = msgspec.field(name="browser_download_url")
    updated_at: str = ""


class _Release(msgspec.Struct):
    assets: list[_Asset]


def fetch(url: str, headers: dict[str, str], limit: int) -> bytes:
    """Return the body of a URL, which may have at most `limit` bytes. Raises `OSError`."""
    if not url.startswith("https://"):
        raise OSError(f"{url!r} is not fetched: the URL must begin with https")
    import urllib.request  # most runtimes fetch nothing, and this imports HTTP and TLS

    request = urllib.request.Request(url, headers=headers)  # noqa: S310 -- https, checked above
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310
        data: bytes = response.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"the file at {url} is larger than {limit} bytes, the limit")
    return data


class Downloads:
    """Resolves `gh:` references. Thread-safe; one download at a time."""

    def __init__(self, store: ModuleStore, limits: RuntimeLimits, *, allowed: bool, get: Fetch = fetch) -> None:
        self._store, self._limits = store, limits
        self._allowed, self._get = allowed, get
        self._lock = threading.Lock()
        self._releases: dict[str, tuple[float, _Release]] = {}

    def resolve(self, text: str, install: Install) -> str:
        """Return the id of the module that a reference means. Raises `InvalidRequest`."""
        reference = GhReference.parse(text)
        if not self._allowed:
            return self._store.resolve(text)
        with self._lock:
            asset = _only_asset(self._release(reference), reference, text)
            key = f"asset:{asset.updated_at}:{asset.url}"
            linked = self._store.linked(key)
            if linked is not None:
                return linked[0]
            module = install(self._download(asset.url), Auth(asset.url[:200], True)).module_id
            self._store.link(key, module)
            return module

    def _release(self, reference: GhReference) -> _Release:
        known = self._releases.get(reference.url)
        if known is not None and time.monotonic() - known[0] < FRESH:
            return known[1]
        headers = {"User-Agent": "AICI", "Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
        try:
            release: Any = msgspec.json.decode(self._get(reference.url, headers, _MAX_METADATA), type=_Release)
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(f"cannot read the release at {reference.url}: {error}", "module_id") from None
        self._releases[reference.url] = (time.monotonic(), release)
        return release  # type: ignore[no-any-return]

    def _download(self, url: str) -> bytes:
        try:
            return self._get(url, {"User-Agent": "AICI"}, self._limits.max_module_bytes)
        except OSError as error:
            raise InvalidRequest(f"cannot download {url}: {error}", "module_id") from None


def _only_asset(release: _Release, reference: GhReference, text: str) -> _Asset:
    found = [a for a in release.assets if a.name.endswith(".wasm") and reference.selector in a.name]
    if len(found) != 1:
        names = ", ".join(asset.name for asset in found) or "none"
        raise InvalidRequest(f"{text!r} must match exactly one .wasm asset; it matches {names}", "module_id")
    return found[0]
