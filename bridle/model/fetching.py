"""Fetches files of a hub repository into the hub client's cache, or finds them there. A callback gets the progress. If
there is no callback, the progress is reported through `bridle.load_progress`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from bridle.errors import BridleError
from bridle.load_progress import on_download
from bridle.model.hub import refusal

Progress = Callable[[float], None]


def fetch(
    model: str, revision: str | None, allowed: Sequence[str], ignored: Sequence[str], progress: Progress | None
) -> Path:
    """Return the folder with a snapshot of the repository's files whose names match `allowed` and do not match
    `ignored`. Threads of the hub client call `progress` with the share of bytes received; an error from `progress` ends
    the download. Raises `UnsupportedModel`."""
    from huggingface_hub import snapshot_download

    arriving = _Arriving(model, revision, allowed, ignored, progress or on_download())
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(allowed),
            ignore_patterns=list(ignored) or None,
            token=os.environ.get("HF_TOKEN") or None,
            tqdm_class=_silent_bar(arriving.tell),
        )
    except BridleError:
        raise
    except Exception as error:
        raise refusal(error, model, revision) from error
    arriving.finish()
    return Path(folder)


class _Arriving:
    """Tracks the progress of a repository's download. The hub client begins files one after the other, and knows only
    the sizes of the files that it has begun. bridle therefore asks the hub for the sizes of all files when the first
    bytes arrive."""

    def __init__(
        self, model: str, revision: str | None, allowed: Sequence[str], ignored: Sequence[str], progress: Progress
    ) -> None:
        self._wanted = model, revision, allowed, ignored
        self._progress = progress
        self._lock = Lock()
        self._total = 0
        self._share = -1.0

    def tell(self, num_bytes: float, begun: float) -> None:
        """Report that `num_bytes` bytes were received so far. `begun` is the total size in bytes of the files whose
        download has begun."""
        with self._lock:
            self._total = max(self._total or _num_bytes(*self._wanted), int(begun), 1)
            share = min(num_bytes / self._total, 1.0)
            is_more, self._share = share > self._share, max(share, self._share)
        if is_more:
            self._progress(share)

    def finish(self) -> None:
        """Report that the download is complete."""
        if 0 <= self._share < 1:  # some files were in the cache before
            self._progress(1.0)


def _num_bytes(model: str, revision: str | None, allowed: Sequence[str], ignored: Sequence[str]) -> int:
    """Return the total bytes of the files to download; 0 if the hub does not state them."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    try:
        entries = HfApi().list_repo_tree(
            model, revision=revision, recursive=True, token=os.environ.get("HF_TOKEN") or None
        )
        sizes = {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
    except Exception:  # a size less to show; if the hub is gone, the download itself says so
        return 0
    names = filter_repo_objects(sizes, allow_patterns=list(allowed), ignore_patterns=list(ignored) or None)
    return sum(sizes[name] for name in names)


def _silent_bar(tell: Callable[[float, float], None]) -> Any:
    """Return a progress bar class for the hub client that shows nothing, because bridle shows its own progress bar. The
    class passes the received bytes and the sizes of begun files to `tell`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **settings | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes and self.total:
                tell(self.n, self.total)

    return Bar
