"""LMTP, the Language Model Transport Protocol: many token streams over one channel.

`Client` and `SyncClient` use a server, either bridle's or LMQL's original server. The clients are imported on first
use, because the protocol itself (`messages`, `session`) needs only the standard library.
"""

from typing import TYPE_CHECKING

from bridle.deprecated_names import old_names
from bridle.lazy_names import lazy_names

if TYPE_CHECKING:  # other names raise an error
    from bridle.lmtp.client import Client as Client
    from bridle.lmtp.client import RetryPolicy as RetryPolicy
    from bridle.lmtp.client import SyncClient as SyncClient
else:
    _load, __all__ = lazy_names(__name__, {"client": "Client RetryPolicy SyncClient"})
    __getattr__ = old_names(__name__, _load)
