"""Check that tests leave no files in the folder for temporary files, and report leftovers. The first process of pytest
makes a folder that all of its processes use for temporary files (`TMPDIR`). It checks this folder at the end, when its
workers have ended or were killed. Files that all tests of a process share are in folders that `kept_folder` made."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from tests.fakes.made_once import SHARED
from tests.waiting import until

_NAME = re.compile(r"(?:sem\.)?bt-(\d+)-.*")
_MEMORY = Path("/dev/shm")
_FOREIGN = ("torchinductor_",)  # folders that libraries keep for the next process

_kept: list[Path] = []


def kept_folder(prefix: str) -> Path:
    """Return a new folder that exists until the last test of this process has ended."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    _kept.append(folder)
    return folder


def pytest_configure(config: pytest.Config) -> None:
    if _is_worker(config):
        return
    root = Path(tempfile.gettempdir())
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(root))  # `tmp_path` is kept for a look at what failed
    _sweep(root)
    folder = tempfile.mkdtemp(prefix=f"bt-{os.getpid()}-")  # short: names of sockets may not be long
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ[SHARED] = os.path.join(folder, "made-once")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    for folder in _kept:
        shutil.rmtree(folder)
    yield
    if _is_worker(session.config):
        return
    _sweep(_MEMORY)
    folder = Path(tempfile.gettempdir())
    shutil.rmtree(os.environ[SHARED], ignore_errors=True)
    try:
        until(lambda: not left_in(folder), "an empty folder for temporary files", 60)
    except AssertionError:
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nERROR: tests left behind temporary files: {', '.join(left_in(folder))}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove the files of test processes that were killed."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not psutil.pid_exists(int(match[1])):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def left_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder. A folder's name comes with some of its content."""
    left = []
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(_FOREIGN):
            inside = sorted(each.name for each in path.iterdir())[:5] if path.is_dir() else ""
            left.append(f"{path.name} {inside}")
    return left


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
