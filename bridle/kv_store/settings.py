"""Settings of a block store: its folder, and the limit on its disk space."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bridle.errors import InvalidRequest
from bridle.kv_store.cipher import BlockCipher, read_cipher
from bridle.kv_store.store import LOCK

#: Default limit of a store in bytes, and maximum share of the free disk.
DEFAULT_LIMIT, DISK_SHARE = 8 << 30, 0.1
#: The value that means the folder in the user's cache.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """`folder` has the blocks of all models, at most `limit` bytes in total. Blocks are encrypted if there is a
    `cipher`."""

    folder: Path
    limit: int
    cipher: BlockCipher | None = None


def default_folder() -> Path:
    """Return the default folder of the store, in the user's cache."""
    from bridle.file_cache import cache_folder  # which imports numpy

    return cache_folder() / "kv"


def default_limit(folder: Path) -> int:
    """Return the default limit in bytes for a store in `folder`."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return min(DEFAULT_LIMIT, int(shutil.disk_usage(existing).free * DISK_SHARE))


def read_settings(place: str | None, limit: int | None, key: str | None = None) -> StoreSettings | None:
    """Return the settings for `kv_store`, `kv_store_bytes` and `kv_store_key`; None if there is no store. Raises
    `InvalidRequest` for a folder or a key that cannot be used."""
    cipher = None if key is None else read_cipher(Path(key))
    if not place or place == "off":
        if cipher is None:
            return None
        raise InvalidRequest("kv_store_key: kv_store is off; set it to a folder, or to `auto`", "kv_store_key")
    folder = default_folder() if place == AUTO else Path(place).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / LOCK).open("ab").close()
    except OSError as error:
        raise InvalidRequest(
            f"kv_store is {place!r}, which cannot be written: {error.strerror}; name a folder that can be written, "
            "or `off`",
            "kv_store",
        ) from None
    return StoreSettings(folder, default_limit(folder) if limit is None else limit, cipher)
