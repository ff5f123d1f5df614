"""Downloads an adapter's two files from the hub. The file sizes are checked before the download. Only
adapter_config.json and adapter_model.safetensors are fetched, both from the same commit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from bridle.errors import AdapterRefused

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95}", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Return whether `name` looks like a hub id: `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def fetch_adapter(name: str, revision: str | None, limits: Mapping[str, int]) -> Path:
    """Download the files named in `limits`, each of at most its limit in bytes. Return the folder of the downloaded
    files in the hub's cache. Honours `HF_HUB_OFFLINE` and `HF_TOKEN`. Raises `AdapterRefused`."""
    from huggingface_hub import constants, snapshot_download

    token = os.environ.get("HF_TOKEN") or None
    try:
        if not constants.HF_HUB_OFFLINE:
            revision = _check_sizes(name, revision, limits, token)
        folder = snapshot_download(name, revision=revision, allow_patterns=list(limits), token=token)
    except AdapterRefused:
        raise
    except Exception as error:
        raise AdapterRefused(f"adapter {name!r} cannot be fetched from the hub: {_reason(error)}", "source") from None
    return Path(folder)


def _check_sizes(name: str, revision: str | None, limits: Mapping[str, int], token: str | None) -> str:
    """Raise `AdapterRefused` for files that are too large, before any file is downloaded. Return the id of the commit
    whose file sizes were checked."""
    from huggingface_hub import HfApi

    info = HfApi(token=token).model_info(name, revision=revision, files_metadata=True, timeout=10.0)
    for file in info.siblings or ():
        limit = limits.get(file.rfilename)
        if limit is not None and (file.size or 0) > limit:
            raise AdapterRefused(f"{name}/{file.rfilename} has {file.size} bytes; at most {limit} are read", "source")
    return info.sha or revision or "main"


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "it is gated; accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "it is not in the local cache, and the hub cannot be reached"
    return f"{type(error).__name__}: {error}"
