"""The adapters of one model, by name. A front end uses this registry before it lets a request choose an adapter.

    info = await asyncio.to_thread(registry.add, "french", "/adapters/french")  # looks at the files
    await registry.ready("french")                                              # read, checked, in memory
    request = build_request(model, prompt, sampling, adapter="french")          # an unknown name is refused

A name means the same weights as long as it is registered. If a name gets other weights, the engine gets a new key for
the name, because its caches must never mix two adapters. A `LoRAStore` manages the weights and their users; this module
does not read weights.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from bridle.errors import BridleError, InvalidRequest, UnknownAdapter, UnsupportedFeature
from bridle.lora import AdapterFiles, AdapterState, AdapterStatus
from bridle.safe_repr import short_repr

PLACEHOLDER = "tgi"
#: Names that mean the base model. Clients of text-generation and huggingface_hub send these names if they know an
#: address but no model.
PLACEHOLDERS = frozenset({PLACEHOLDER, "dummy"})
#: Beginnings of an address. Some clients (huggingface's for JavaScript) send the endpoint's address as the model's
#: name.
_SCHEMES = ("http://", "https://")
#: Maximum number of registered adapters of one model.
MAX_ADAPTERS = 10_000
_MAX_SHOWN_NAMES = 20
_NAME = re.compile(r"[A-Za-z0-9][\w.:@+\-]{0,95}(/[\w.:@+\-]{1,96}){0,3}", re.ASCII)


def is_address(name: str) -> bool:
    """Return whether a client sent an address in place of a model's name."""
    return name[:8].lower().startswith(_SCHEMES)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """The state of an adapter at one moment.

    `source` is the adapter's folder or hub id. `targets` are the kinds of layers that the adapter changes (`q_proj`,
    ...). `num_bytes` is the memory of the adapter's weights, in bytes. `error` is the reason why loading failed, if the
    state is `failed`. `num_users` is the number of requests that use the adapter or wait for it.
    """

    name: str
    source: str
    revision: str | None
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    state: AdapterState = "known"
    error: str | None = None
    num_users: int = 0


class LoRAStore(Protocol):
    """Keeps the adapters of a model in memory, under the keys that the registry gives them. The methods may be called
    from any thread."""

    def check(self, files: AdapterFiles) -> None:
        """Raise `AdapterRefused` if the adapter does not fit the model. Reads no weights."""

    def add(self, key: str, files: AdapterFiles) -> None:
        """Allow requests to use the adapter from now on. The weights of the adapter are not loaded yet."""

    def remove(self, key: str) -> None:
        """Remove the adapter. No new request may use the adapter. The memory of the adapter is freed when its last user
        has ended."""

    def status(self, key: str) -> AdapterStatus:
        raise NotImplementedError

    def fetch(self, key: str) -> Future[None]:
        """Begin to load the adapter. The future completes when the adapter is in memory, and fails if the adapter
        cannot be loaded."""


@dataclass(frozen=True, slots=True)
class _Entry:
    home: LoRAStore
    key: str
    source: str
    revision: str | None
    files: AdapterFiles
    previous: str | None = None  # earlier key of the name, for requests made with it that have not begun


class AdapterRegistry:
    """The adapters of one model, by name. `base_names` mean the model without an adapter: the model's name, and then
    its aliases.

    Iterating gives the names of the adapters. All methods are safe from any thread. Only `add` and `replace` may take
    long.
    """

    def __init__(
        self, home: LoRAStore | None = None, base_names: Iterable[str] = (), unpack: Callable[[str], str] | None = None
    ) -> None:
        """Create an empty registry. `home` is None if the model's backend does not support adapters. `unpack` converts
        a source that is a file into an adapter folder for this model."""
        self._unpack = unpack
        self._home = home
        self._base_names = dict.fromkeys(base_names)
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    # -- registered adapters -------------------------------------------------------------------------------------

    def add(self, name: str, source: str, revision: str | None = None) -> AdapterInfo:
        """Register an adapter under the name `name`. `source` is the adapter's folder, GGUF file or hub repository.

        The call reads the metadata of the files and downloads them first if `source` is a hub id. The call blocks, so
        call it in a thread. The weights are read when a request or `ready` needs them. Raises `InvalidRequest` for a
        name that is in use or not allowed, `AdapterRefused` for unusable files, and `UnsupportedFeature` if the backend
        does not support adapters. After an error, nothing is registered.
        """
        self._check_name(name)
        self._check_free(name)
        entry = self._inspect(name, source, revision)
        with self._lock:
            self._check_free(name)
            entry.home.add(entry.key, entry.files)
            self._entries[name] = entry
        return self._info(name, entry)

    def replace(self, name: str, source: str, revision: str | None = None) -> AdapterInfo:
        """Register an adapter as `add` does, but also under a name that is already registered. When the new weights are
        in memory, new requests use them. Requests that have begun keep the old weights to their end. After an error,
        nothing has changed. The call blocks until the weights are read."""
        self._check_name(name)
        if name not in self._entries:
            self._check_free(name)
        entry = self._inspect(name, source, revision)
        entry.home.add(entry.key, entry.files)
        try:
            entry.home.fetch(entry.key).result()
        except BridleError:
            with self._lock:
                if entry.key not in self._keys_of(name):
                    entry.home.remove(entry.key)
            raise
        with self._lock:
            self._put(name, entry)
        return self._info(name, entry)

    def _put(self, name: str, entry: _Entry) -> None:
        """Set the weights for a name. The previous weights stay for requests that were created with them and have not
        begun; even older weights are removed."""
        old = self._entries.get(name)
        if old is None:
            self._check_free(name)
            self._entries[name] = entry
            return
        keys = self._keys_of(name)
        self._entries[name] = entry if old.key == entry.key else replace(entry, previous=old.key)
        for key in keys - self._keys_of(name):
            entry.home.remove(key)

    def _keys_of(self, name: str) -> set[str]:
        entry = self._entries.get(name)
        return set() if entry is None else {entry.key, entry.previous or entry.key}

    def _inspect(self, name: str, source: str, revision: str | None) -> _Entry:
        from bridle.lora import find_adapter

        if self._home is None:
            raise UnsupportedFeature("this model's backend applies no adapters", "adapter")
        files = find_adapter(self._unpack(source) if self._unpack is not None else source, revision)
        self._home.check(files)
        return _Entry(self._home, f"{name}#{files.digest}", source, revision, files)

    def remove(self, name: str) -> None:
        """Remove an adapter. Requests that use the adapter continue to their end; then its memory is freed. Raises
        `UnknownAdapter`."""
        with self._lock:
            entry, keys = self._find(name), self._keys_of(name)
            del self._entries[name]
            for key in keys:
                entry.home.remove(key)

    def get(self, name: str) -> AdapterInfo:
        """Return the current state of one adapter. Raises `UnknownAdapter`."""
        return self._info(name, self._find(name))

    def list(self) -> tuple[AdapterInfo, ...]:
        """Return the current state of all adapters, in the order in which they were added."""
        return tuple([self._info(name, entry) for name, entry in list(self._entries.items())])

    # -- use by requests -----------------------------------------------------------------------------------------

    def resolve(self, name: str | None) -> str | None:
        """Return the opaque key for `Request.adapter`; None for the base model. None, the empty name, `PLACEHOLDERS`
        and the names of the model itself mean the model without an adapter. Raises `UnknownAdapter`; the message lists
        the known names."""
        if not name:
            return None
        entry = self._entries.get(name)
        if entry is None and self.is_base(name):
            return None
        return (entry or self._find(name)).key

    def is_base(self, name: str) -> bool:
        """Return whether `name` means the model without an adapter."""
        return name in self._base_names or name in PLACEHOLDERS

    def add_base_names(self, names: Iterable[str]) -> None:
        """Add names that mean the base model."""
        self._base_names.update(dict.fromkeys(names))

    async def ready(self, name: str) -> AdapterInfo:
        """Wait until the adapter is read, checked and in memory. Loading of the adapter begins if necessary. A request
        need not call this method, because the engine lets it wait. Raises `UnknownAdapter`, or the reason why the
        adapter cannot be loaded (`AdapterRefused` for invalid weights). Cancelling the caller ends the wait, but not
        the loading of the adapter."""
        entry = self._find(name)
        await asyncio.shield(asyncio.wrap_future(entry.home.fetch(entry.key)))
        return self._info(name, entry)

    def fetch(self, name: str) -> Future[None]:
        """Return a future that completes when the adapter is in memory, and fails if the adapter cannot be loaded. For
        threads."""
        entry = self._find(name)
        return entry.home.fetch(entry.key)

    def is_in_memory(self, name: str) -> bool:
        """Return whether the adapter is in memory. If the adapter is in memory, `ready` returns at once. Raises
        `UnknownAdapter`."""
        return self.get(name).state in ("host", "device")

    # -- helpers -------------------------------------------------------------------------------------------------

    def _info(self, name: str, entry: _Entry) -> AdapterInfo:
        files, now = entry.files, entry.home.status(entry.key)
        return AdapterInfo(
            name,
            entry.source,
            entry.revision,
            files.rank,
            files.targets,
            files.num_bytes,
            now.state,
            now.error,
            now.num_users,
        )

    def _find(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise self._unknown(name) from None

    def _unknown(self, name: str) -> UnknownAdapter:
        names = list(self._entries)
        known = ", ".join(repr(other) for other in names[:_MAX_SHOWN_NAMES]) or "none"
        more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
        model = f"{next(iter(self._base_names))!r}" if self._base_names else "the model"
        return UnknownAdapter(f"{model} has no adapter {short_repr(name)}; known: {known}{more}", "adapter")

    def _check_name(self, name: str) -> None:
        if _NAME.fullmatch(name) is None or ".." in name:
            raise InvalidRequest(
                f"adapter name {short_repr(name)} is not allowed; use letters, digits, . _ - : @ + and up to three "
                "slashes, and begin with a letter or digit",
                "name",
            )

    def _check_free(self, name: str) -> None:
        if self.is_base(name):
            raise InvalidRequest(
                f"adapter name {short_repr(name)} is reserved for the base model; choose another name", "name"
            )
        if name in self._entries:
            raise InvalidRequest(
                f"an adapter named {short_repr(name)} exists already; remove it first, or replace it", "name"
            )
        if len(self._entries) >= MAX_ADAPTERS:
            raise InvalidRequest(
                f"the server has {len(self._entries)} adapters already; at most {MAX_ADAPTERS}", "name"
            )
