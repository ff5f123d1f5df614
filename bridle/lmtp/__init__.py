"""LMTP, the Language Model Transport Protocol: many token streams over one channel.

`Client` and `SyncClient` use a server, bridle's or the original one. They are imported on first use: the protocol
itself (`messages`, `session`) needs only the standard library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bridle.deprecated_names import old_names

if TYPE_CHECKING:
    from bridle.lmtp.client import Client, RetryPolicy, SyncClient

__all__ = ["Client", "RetryPolicy", "SyncClient"]


def _load(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("bridle.lmtp.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # to a type checker, a name that is gone is an error
    __getattr__ = old_names(__name__, _load)
