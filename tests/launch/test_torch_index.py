"""Tests of the PyTorch build that `make install` chooses: the one without CUDA if there is no NVIDIA driver and the
package index answers.

A small checkout with the project's Makefile installs tiny wheels from folders and from a local server."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.sources import ROOT
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="other systems have no choice of wheels"),
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
]
DRIVER = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
without_driver = pytest.mark.skipif(DRIVER, reason="this machine has an NVIDIA driver")

PROJECT = """
[project]
name = "bridle"
version = "0"
dependencies = ["torch"]
[project.optional-dependencies]
aici = []
cluster = []
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("bridle-0-py3-none-any.whl", folder).rpartition("/")[2]
"""


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel without code that requires the packages `needs`."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]))


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    made = tmp_path / "checkout"
    (made / "scripts").mkdir(parents=True)
    for name in ("Makefile", "scripts/torch_index.py"):
        shutil.copy(ROOT / name, made / name)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (made / "constraints.txt").write_text("\n".join(line for line in pins if line.startswith("torch==")) + "\n")
    (made / "pyproject.toml").write_text(PROJECT)
    (made / "backend.py").write_text(BACKEND)
    wheel(made, "bridle", "0", "torch")
    return made


@pytest.fixture
def pinned(checkout: Path) -> str:
    return (checkout / "constraints.txt").read_text().strip().partition("==")[2]


@pytest.fixture
def usual(tmp_path: Path, pinned: str) -> Path:
    """Return the folder that pip is configured to use: it has torch for CUDA, which requires another package."""
    folder = tmp_path / "usual"
    wheel(folder, "torch", pinned, "nvidia_cuda")
    wheel(folder, "nvidia_cuda", "13")
    return folder


@pytest.fixture
def index(tmp_path: Path, pinned: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a local copy of PyTorch's package index; a dependency of its torch is in pip's extra index."""
    wheel(tmp_path / "web" / "cpu" / "torch", "torch", f"{pinned}+cpu", "mirrored")
    wheel(tmp_path / "web" / "mirror" / "mirrored", "mirrored", "1")
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(tmp_path / "web")))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{url}/mirror")
    yield f"{url}/cpu/"
    server.shutdown()
    server.server_close()


def install(checkout: Path, usual: Path, index: str, path: str = os.environ["PATH"]) -> tuple[set[str], str]:
    """Run `make install` without a network; return the installed packages and the command's output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHONPATH"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(usual), "PIP_INDEX_URL": usual.as_uri(), "PATH": path}
    done = subprocess.run(
        ["make", "install", f"PYTHON={sys.executable}", f"TORCH_INDEX={index}"],
        cwd=checkout, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    site = next((checkout / ".venv" / "lib").glob("python*/site-packages"))
    found = {path.name.removesuffix(".dist-info") for path in site.glob("*.dist-info")}
    return {name for name in found if name.startswith(("torch", "nvidia", "mirrored"))}, done.stdout + done.stderr


@without_driver
def test_without_a_driver_comes_the_build_without_cuda(checkout: Path, usual: Path, index: str, pinned: str) -> None:
    installed, said = install(checkout, usual, index)
    assert installed == {f"torch-{pinned}+cpu", "mirrored-1"}
    assert "No NVIDIA driver: PyTorch comes without CUDA." in said


@pytest.mark.slow
def test_with_a_driver_nothing_changes(checkout: Path, usual: Path, index: str, pinned: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    installed, said = install(checkout, usual, index, f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert installed == {f"torch-{pinned}", "nvidia_cuda-13"}
    assert "PyTorch" not in said


@pytest.mark.slow  # pip starts twice
@without_driver
def test_an_index_that_does_not_answer_is_passed_over(checkout: Path, usual: Path, pinned: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        index = f"http://127.0.0.1:{taken.getsockname()[1]}/whl/cpu"
        installed, said = install(checkout, usual, index)
    assert installed == {f"torch-{pinned}", "nvidia_cuda-13"}
    (line,) = [line for line in said.splitlines() if "PyTorch" in line]
    assert line.startswith(f"{index} cannot be used ([Errno 111] Connection refused): pip's own indexes decide")


@pytest.mark.slow  # as long as it waits for an answer
@without_driver
def test_an_index_that_hangs_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        printed, said = asked(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert printed == "" and "pip's own indexes decide" in said


@without_driver
def test_an_index_without_torch_is_passed_over() -> None:
    printed, said = asked("data:text/html,#")
    assert printed == "" and "(it has no torch)" in said


def test_no_index_is_asked_where_none_is_named() -> None:
    assert asked("") == ("", "")


def asked(index: str) -> tuple[str, str]:
    """Run `torch_index.py` in a Python without packages; return its output and its errors."""
    script = [sys.executable, "-S", str(ROOT / "scripts" / "torch_index.py"), index]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow
@without_driver
def test_what_is_installed_stays(checkout: Path, usual: Path, index: str, pinned: str) -> None:
    """A second `make install` with another index, or a change to another pin, keeps the installed build of torch."""
    first, _ = install(checkout, usual, "")
    (checkout / "constraints.txt").write_text(f"torch=={pinned}\nnone==1\n")
    again, said = install(checkout, usual, index)
    assert first == again and "PyTorch" not in said
