"""One name in the registry and what there is behind it: a loaded model, one on its way, or only the way to load it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.errors import ModelUnavailable
    from bridle.service.loading import LoadedModel


class ModelState(StrEnum):
    """What a known model is doing: it answers, it is on its way, or it would be loaded if somebody asked."""

    LOADED = "loaded"
    LOADING = "loading"
    LOADABLE = "loadable"


@dataclass(slots=True, eq=False)
class Slot:
    """`config` says how to load the model, None if it came loaded. A pinned one is never closed; a passing one was
    found in the catalog when a request named it, and means nothing any more once it is vacant.

    Who holds a lease is counted, and who waits for the load; while there is either, the model stays. `num_bytes` is
    the memory that it counts for, from the moment when room was made. `stage` and `share` tell how far a load is.
    Belongs to one event loop.
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
    is_filling: bool = False  # the load is past the point where nothing would be lost by giving it up
    failure: ModelUnavailable | None = None
    failed_until: float = 0.0

    @property
    def state(self) -> ModelState:
        if self.model is not None:
            return ModelState.LOADED
        return ModelState.LOADABLE if self.task is None else ModelState.LOADING

    @property
    def is_vacant(self) -> bool:
        """Nothing here that anybody waits for or would have to remember."""
        return self.model is None and self.task is None and self.failure is None and self.num_waiting == 0

    @property
    def is_idle(self) -> bool:
        """Loaded, and nobody would miss it."""
        unused = self.num_leases == 0 and self.num_waiting == 0
        return self.model is not None and unused and not self.is_pinned
