"""A slot is one name in the registry and its model, which is loaded, loading, or loadable. A lease keeps a loaded model
loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.control_vectors import ControlVectors
    from bridle.errors import ModelUnavailable
    from bridle.serving.lora.adapter_registry import AdapterInfo
    from bridle.serving.models.loading import LoadedModel


class ModelState(StrEnum):
    """The state of a known model: loaded, loading, or loadable on request."""

    LOADED = "loaded"
    LOADING = "loading"
    LOADABLE = "loadable"


@dataclass(slots=True, eq=False)
class Slot:
    """A name in the registry, and how its model is loaded.

    `config` has the settings for loading; None for a model that was added after loading. A pinned model is never
    unloaded. A passing slot was created because a request named a model in the catalog. A passing slot is dropped when
    it is vacant. Leases and waiting requests are counted. While a slot has leases or waiting requests, its model stays
    loaded. `num_bytes` is the memory reserved for the model, in bytes. `stage` and `share` are the progress of a load.
    Only one event loop may use a slot.
    """

    name: str
    config: ModelConfig | None = None
    model: LoadedModel | None = None
    is_pinned: bool = False
    is_passing: bool = False
    num_leases: int = 0
    num_waiting: int = 0
    last_used: float = 0.0
    keep_seconds: float | None = None  # seconds after the last request; None: until its memory is needed
    num_bytes: int = 0
    stage: str = ""
    share: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    # measures the memory needs, perhaps for a cancelled load
    finding: asyncio.Future[Any] | None = field(default=None, repr=False)
    is_filling: bool = False  # cancelling the load now would lose work
    failure: ModelUnavailable | None = None
    failed_until: float = 0.0
    filled: ModelConfig | None = None
    num_faults: int = 0
    is_restarting: bool = False
    is_given_up: bool = False  # the engine failed too often and is not restarted
    adapters: tuple[AdapterInfo, ...] = ()  # adapters of the engine that failed
    control_vectors: ControlVectors | None = None  # control vectors of the engine that failed

    @property
    def state(self) -> ModelState:
        if self.model is not None:
            return ModelState.LOADED
        return ModelState.LOADABLE if self.task is None else ModelState.LOADING

    @property
    def is_vacant(self) -> bool:
        """Return whether the slot has no model, no load in progress, no waiting request and no stored failure."""
        is_at_work = self.task is not None or self.finding is not None or self.num_waiting > 0
        return self.model is None and self.failure is None and not is_at_work

    @property
    def is_idle(self) -> bool:
        """Return whether the model is loaded and no request uses or awaits it."""
        unused = self.num_leases == 0 and self.num_waiting == 0
        return self.model is not None and unused and not self.is_pinned


@dataclass(slots=True, eq=False)
class Lease:
    """A lease on a loaded model. A front end takes a lease before it uses a model, and keeps it until the last event of
    its request. `model` stays loaded until `release`. A `with` block returns the model and releases the lease at the
    end of the block."""

    model: LoadedModel
    on_release: Callable[[], None] | None = None

    def release(self) -> None:
        """Release the model. Idempotent."""
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> LoadedModel:
        return self.model

    def __exit__(self, *exc_info: object) -> None:
        self.release()
