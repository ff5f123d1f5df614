"""Files of a hub repository, fetched into the hub's own cache or found there, with a callback for how far that is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bridle.errors import BridleError, UnsupportedModel

Progress = Callable[[float], None]


def fetch(
    model: str, revision: str | None, allowed: Sequence[str], ignored: Sequence[str], progress: Progress | None
) -> Path:
    """The snapshot of a repository's files that fit `allowed` and not `ignored`. `progress` gets the share of bytes,
    from threads of the hub's client; an error that it raises ends the download. Raises `UnsupportedModel`."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(allowed),
            ignore_patterns=list(ignored) or None,
            token=os.environ.get("HF_TOKEN") or None,
            tqdm_class=_silent_bar(progress or (lambda share: None)),
        )
    except BridleError:
        raise
    except Exception as error:
        raise _translate(error, model, revision) from error
    return Path(folder)


def _silent_bar(progress: Progress) -> Any:
    """A bar of the client's kind that shows nothing and tells `progress`: ours is on the screen."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **settings | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes and self.total:
                progress(min(self.n / self.total, 1.0))

    return Bar


def _translate(error: Exception, model: str, revision: str | None) -> BridleError:
    """One of the hub client's many errors, as one sentence that says what to do."""
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return UnsupportedModel(f"model {model!r} is gated: accept its terms on the hub and set HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return UnsupportedModel(f"model {model!r} has no revision {revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UnsupportedModel(f"there is no folder {model!r}, and the hub has no such model (or it is private)")
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_offline():
        return UnsupportedModel(
            f"model {model!r}{at} is not in the local hub cache, and the hub cannot be reached "
            f"(offline mode is {'on' if _is_offline() else 'off'})"
        )
    return UnsupportedModel(f"model {model!r}{at} could not be fetched: {type(error).__name__}: {error}")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}
