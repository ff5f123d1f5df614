"""A lease on a loaded model: while there is one, the model stays loaded.

A front-end takes a lease before it reads anything of a model, and keeps it until it has read the last event of its
request. This module knows nothing of loading.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridle.service.loading import LoadedModel


class Lease:
    """`model` is loaded, and stays so until `release`. A `with` block gives the model and releases it at its end."""

    def __init__(self, model: LoadedModel, on_release: Callable[[], None] | None = None) -> None:
        self.model = model
        self._on_release = on_release

    def release(self) -> None:
        """End the lease. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> LoadedModel:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
