"""The state of an adapter at a moment, in the words that front-ends show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: `known`: on disk only. `loading`: on its way into memory. `host`: in the computer's memory. `device`: where the model
#: computes. `failed`: it could not be read; a further use tries again.
AdapterState = Literal["known", "loading", "host", "device", "failed"]


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """The part of an adapter's description that changes. `num_users` counts the requests that use it now, or wait for
    it."""

    state: AdapterState = "known"
    error: str | None = None
    num_users: int = 0
