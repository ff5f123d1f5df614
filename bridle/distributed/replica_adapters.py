"""One `LoRAStore` for the LoRA adapters of several replicas. Each replica gets the list of all adapters, and loads
those that its requests name.

The router does not manage memory: every replica has its own engine and `AdapterPool`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from bridle.distributed import adapter_messages as m
from bridle.distributed.codec.errors import pack_error, unpack_error
from bridle.errors import AdapterRefused, BridleError, EngineClosed, UnknownAdapter, UnsupportedFeature
from bridle.lora import AdapterFiles, AdapterLimits, AdapterPool, AdapterState, AdapterStatus
from bridle.threads import conclude_all

#: The states of an adapter, from least to most ready.
_STATES: tuple[AdapterState, ...] = ("failed", "known", "loading", "host", "device")


class ReplicatedLoRAStore:
    """The router's end: a `LoRAStore` for all replicas. `send(number, message)` sends a message to replica `number`."""

    def __init__(self, send: Callable[[int, m.AdapterMessage], None]) -> None:
        self._send = send
        self._lock = threading.RLock()
        self._limits: AdapterLimits | None = None
        self._known: dict[str, AdapterFiles] = {}
        self._up: dict[int, Mapping[str, m.AdapterNews]] = {}  # connected replicas, and their last news
        self._fetches: dict[str, list[Future[None]]] = {}
        self._failed: dict[str, dict[int, BridleError]] = {}  # by awaited adapter: who failed, and why

    # -- for the registry ------------------------------------------------------------------------------------

    def check(self, files: AdapterFiles) -> None:
        if self._limits is None:
            raise UnsupportedFeature("the replicas of this model apply no adapters", "adapter")
        self._limits.check(files)

    def add(self, key: str, files: AdapterFiles) -> None:
        with self._lock:
            self._known[key] = files
            self._tell(m.pack_adapter(key, files))

    def remove(self, key: str) -> None:
        with self._lock:
            if self._known.pop(key, None) is not None:
                self._tell(m.RemoveAdapter(key))
                self._settle(key, UnknownAdapter("the adapter was removed while the request waited", "adapter"))

    def status(self, key: str) -> AdapterStatus:
        """Return the adapter's most advanced state in any replica, and the total number of its users."""
        with self._lock:
            news = [known[key] for known in self._up.values() if key in known]
        if not news:
            return AdapterStatus()
        state, error, _ = max(news, key=lambda one: _STATES.index(one[0]))
        return AdapterStatus(state, error, sum(num_users for _, _, num_users in news))

    def fetch(self, key: str) -> Future[None]:
        """Ask the replicas to read the adapter. The future completes when one replica has the adapter, and fails when
        no replica can read it."""
        future: Future[None] = Future()
        with self._lock:
            if key not in self._known:
                raise UnknownAdapter("the adapter was removed while the request waited", "adapter")
            self._fetches.setdefault(key, []).append(future)
            self._failed[key] = {}
            self._tell(m.FetchAdapter(key))
        return future

    def close(self) -> None:
        """End all fetches in progress."""
        with self._lock:
            for key in list(self._fetches):
                self._settle(key, EngineClosed("the replicas were shut down"))

    # -- for the links -----------------------------------------------------------------------------------------

    def note_up(self, number: int, limits: AdapterLimits | None) -> None:
        """Record that a replica is connected. The replica gets the list of all adapters before any request."""
        with self._lock:
            self._limits = limits
            self._up[number] = {}
            for key, files in self._known.items():
                self._send(number, m.pack_adapter(key, files))
            for key in self._fetches:
                self._send(number, m.FetchAdapter(key))

    def note_lost(self, number: int) -> None:
        """Record that a replica is lost, so that no fetch waits for this replica."""
        with self._lock:
            self._up.pop(number, None)
            for key, failed in list(self._failed.items()):
                failed.pop(number, None)
                self._give_up(key)

    def note_news(self, number: int, news: Mapping[str, m.AdapterNews]) -> None:
        with self._lock:
            if number in self._up:
                self._up[number] = news

    def note_fetched(self, number: int, message: m.AdapterFetched) -> None:
        with self._lock:
            if message.error is None:
                self._settle(message.key, None)
                return
            failed = self._failed.get(message.key)
            if failed is None:
                return
            failed[number] = unpack_error(*message.error)
            self._give_up(message.key)

    # -- with the lock held --------------------------------------------------------------------------------------

    def _tell(self, message: m.AdapterMessage) -> None:
        for number in self._up:
            self._send(number, message)

    def _give_up(self, key: str) -> None:
        """Fail the fetch of an adapter if every connected replica has failed to read it."""
        failed = self._failed[key]
        if failed and failed.keys() >= self._up.keys():
            *_, error = failed.values()
            self._settle(key, error)

    def _settle(self, key: str, error: BridleError | None) -> None:
        self._failed.pop(key, None)
        conclude_all(self._fetches.pop(key, ()), error)


class HomeServer:
    """The replica's end of the adapter messages, for one router. `send` may be called from any thread."""

    def __init__(self, pool: AdapterPool | None, send: Callable[[m.AdapterFetched], None]) -> None:
        self._pool = pool
        self._send = send
        self._keys: dict[str, None] = {}

    def handle(self, message: m.AdapterMessage) -> None:
        """Handle the router's message."""
        if self._pool is None:
            return
        if isinstance(message, m.AddAdapter):
            self._keys[message.key] = None
            self._pool.add(message.key, m.unpack_adapter(message))
        elif isinstance(message, m.RemoveAdapter):
            self._keys.pop(message.key, None)
            self._pool.remove(message.key)
        else:
            self._fetch(self._pool, message.key)

    def news(self) -> dict[str, m.AdapterNews]:
        """Return the changed states of adapters, by key."""
        pool = self._pool
        states = {} if pool is None else {key: pool.status(key) for key in self._keys}
        return {
            key: (now.state, now.error, now.num_users)
            for key, now in states.items()
            if now.state != "known" or now.num_users
        }

    def close(self) -> None:
        """Remove the adapters of the router, which has disconnected."""
        if self._pool is not None:
            for key in self._keys:
                self._pool.remove(key)

    def _fetch(self, pool: AdapterPool, key: str) -> None:
        def tell(done: Future[None]) -> None:
            error = done.exception()
            known = error if isinstance(error, BridleError) or error is None else AdapterRefused(str(error), "adapter")
            self._send(m.AdapterFetched(key, None if known is None else pack_error(known)))

        try:
            pool.fetch(key).add_done_callback(tell)
        except BridleError as error:
            self._send(m.AdapterFetched(key, pack_error(error)))
