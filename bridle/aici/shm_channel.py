"""The shared-memory link between an engine and its runtime: two channels, each with two directions, and the region of
masks.

The engine creates shared objects whose names begin with its own prefix, then starts the runtime, which attaches to
them. Channels with semaphores and channels with futexes have the same interface. The creator of a link may `unlink` it
once the peer has attached. Unlinked objects disappear when both processes have ended.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bridle.aici import shm
from bridle.aici.futex import FutexChannel
from bridle.aici.semaphores import SemaphoreChannel, remove_semaphore

MIB = 1 << 20
#: Returns whether the peer process runs; called now and then during a wait.
Alive = Callable[[], bool]


class MessageChannel(Protocol):
    """Interface for one direction of a channel."""

    max_message: int

    def send(self, message: bytes, timeout: float | None = None, alive: Alive | None = None) -> None: ...
    def receive(self, timeout: float | None = None, alive: Alive | None = None) -> bytes | None: ...
    def unlink(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Duplex:
    """A channel as one side uses it: one direction to send, the other to receive."""

    outgoing: MessageChannel
    incoming: MessageChannel

    def send(self, message: bytes, timeout: float | None = None, alive: Alive | None = None) -> None:
        """Send a message; see `SemaphoreChannel.send`."""
        self.outgoing.send(message, timeout, alive)

    def receive(self, timeout: float | None = None, alive: Alive | None = None) -> bytes | None:
        """Receive a message; see `SemaphoreChannel.receive`."""
        return self.incoming.receive(timeout, alive)

    @property
    def max_message(self) -> int:
        return self.outgoing.max_message


@dataclass(slots=True)
class SharedChannels:
    """All shared objects of a link. `masks` is the region of masks or bias rows."""

    main: Duplex
    side: Duplex
    masks: mmap.mmap
    prefix: str

    def unlink(self) -> None:
        """Remove the names of all shared objects. Both sides can still use the link. Idempotent."""
        for channel in self._channels:
            channel.unlink()
        shm.remove_region(f"{self.prefix}bin-shm")

    def close(self) -> None:
        """Close all objects that this side has open. No thread may be waiting in a channel of this link."""
        for channel in self._channels:
            channel.close()
        with contextlib.suppress(BufferError):  # a view of rows is still in use: the memory is freed with the last view
            self.masks.close()

    @property
    def _channels(self) -> tuple[MessageChannel, ...]:
        return (self.main.outgoing, self.main.incoming, self.side.outgoing, self.side.incoming)


def create_link(
    prefix: str, *, json_size: int = 128 * MIB, mask_size: int = 64 * MIB, futex: bool = False
) -> SharedChannels:
    """Create every object of a link, for the engine's side. Old objects with the same names are removed. Sizes are in
    bytes. If the creation fails, no object remains."""
    shm.check_prefix(prefix)
    try:
        channels = _open_channels(prefix, json_size, futex, create=True)
        masks = shm.create_region(f"{prefix}bin-shm", mask_size)
    except BaseException:
        remove_names(prefix)
        raise
    return SharedChannels(Duplex(channels[0], channels[1]), Duplex(channels[2], channels[3]), masks, prefix)


def attach_link(prefix: str, *, json_size: int, mask_size: int, futex: bool = False) -> SharedChannels:
    """Open the objects that the engine created, for the runtime's side. In futex mode the channels' names are removed
    at once, as the original runtime does, so that no other process can attach."""
    shm.check_prefix(prefix)
    channels = _open_channels(prefix, json_size, futex, create=False)
    masks = shm.open_region(f"{prefix}bin-shm", mask_size)
    link = SharedChannels(Duplex(channels[1], channels[0]), Duplex(channels[3], channels[2]), masks, prefix)
    if futex:
        for channel in channels:
            channel.unlink()
    return link


def remove_names(prefix: str) -> None:
    """Remove every object that a link with this prefix may have created, for each kind of synchronization."""
    for name in ("cmd", "resp", "cmd-side", "resp-side"):
        for suffix in ("", "-shm"):
            shm.remove_region(f"{prefix}{name}{suffix}")
        for suffix in ("-wr", "-rd"):
            remove_semaphore(f"{prefix}{name}{suffix}")
    shm.remove_region(f"{prefix}bin-shm")


def _open_channels(prefix: str, size: int, futex: bool, *, create: bool) -> list[MessageChannel]:
    """Open the four directions: main command, main reply, side command, side reply."""
    opened: list[MessageChannel] = []
    for name in ("cmd", "resp", "cmd-side", "resp-side"):
        if futex:
            to_runtime = name.startswith("cmd")
            opened.append(FutexChannel(prefix + name, size, to_runtime=to_runtime, create=create))
        else:
            opened.append(SemaphoreChannel(prefix + name, size, create=create))
    return opened
