"""One name in the registry and the model behind it, which is loaded, being loaded, or only loadable; and a lease on a
loaded model: while there is one, the model stays loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.errors import ModelUnavailable
    from bridle.serving.models.loading import LoadedModel


class ModelState(StrEnum):
    """The state of a known model: it answers, it is being loaded, or it would be loaded if a request asked."""

    LOADED = "loaded"
    LOADING = "loading"
    LOADABLE = "loadable"


@dataclass(slots=True, eq=False)
class Slot:
    """A name, and how its model is loaded.

    `config` says how to load the model, None if it came loaded. A pinned model is never closed. A passing slot was made
    for a name that a request named from the catalog, and is dropped once it is vacant. Leases and waiters are counted;
    while there are any, the model stays. `num_bytes` is the memory that the slot counts for, from the moment when room
    was made. `stage` and `share` tell how far a load is. A slot belongs to one event loop.
    """

    name: str
    config: ModelConfig | None = None
    model: LoadedModel | None = None
    is_pinned: bool = False
    is_passing: bool = False
    num_leases: int = 0
    num_waiting: int = 0
    last_used: float = 0.0
    num_bytes: int = 0
    stage: str = ""
    share: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    finding: asyncio.Future[Any] | None = field(default=None, repr=False)  # measures, perhaps for a load given up
    is_filling: bool = False  # giving up the load now would lose work
    failure: ModelUnavailable | None = None
    failed_until: float = 0.0

    @property
    def state(self) -> ModelState:
        if self.model is not None:
            return ModelState.LOADED
        return ModelState.LOADABLE if self.task is None else ModelState.LOADING

    @property
    def is_vacant(self) -> bool:
        """Return whether the slot holds no model, no load or rest of one, no waiter and no failure to remember."""
        is_at_work = self.task is not None or self.finding is not None or self.num_waiting > 0
        return self.model is None and self.failure is None and not is_at_work

    @property
    def is_idle(self) -> bool:
        """Return whether the model is loaded, and no request uses it or waits for it."""
        unused = self.num_leases == 0 and self.num_waiting == 0
        return self.model is not None and unused and not self.is_pinned


@dataclass(slots=True, eq=False)
class Lease:
    """A lease on a loaded model. A front-end takes it before it reads anything of a model, and keeps it until it has
    read the last event of its request. `model` stays loaded until `release`; a `with` block gives the model and
    releases it at its end."""

    model: LoadedModel
    on_release: Callable[[], None] | None = None

    def release(self) -> None:
        """Let go of the model. Idempotent."""
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> LoadedModel:
        return self.model

    def __exit__(self, *exc_info: object) -> None:
        self.release()
