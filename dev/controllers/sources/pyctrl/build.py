"""Build pyctrl: CPython with `guest/` in it, as a component, made offline by componentize-py.

The tool runs the interpreter once, lets it import everything, and keeps a picture of its memory. `reproducible.c` keeps
chance and time out of the picture. What is left are traces of inode numbers in memory that nobody initialized or uses
any more: a few bytes that differ between any two builds, and are set to zero. The order in which directories are listed
shows, too; a file system in memory has one of its own making, others depend on the disk. So the same sources give the
same bytes, on Linux with room in `/dev/shm`.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from bridle.controllers.standard import FOLDER
from bridle.errors import InvalidRequest
from dev.controllers.rebuild import MachineCode
from dev.controllers.toolchain import run, zig_cc

HERE = Path(__file__).parent
WIT = FOLDER.parents[1] / "aici" / "runtime" / "wit"

SOURCES: dict[str, str] = {}
TOOLS = {"componentize-py": "0.25.1", "wasmtime": "50.0.1", "ziglang": "0.17.1"}

#: Enough that no trace is the same byte in all of them.
_NUM_BUILDS = 3
_MAX_TRACES = 500
_CHUNK = 4096
_MEMORY = Path("/dev/shm")  # noqa: S108 -- a new folder with an unpredictable name is made there
_ROOM = 256 << 20


def build(out: Path) -> None:
    """Write the module to `out`."""
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM
    with tempfile.TemporaryDirectory(prefix="bridle-pyctrl-", dir=_MEMORY if in_memory else None) as name:
        folder = Path(name)
        zig_cc(["-shared", "-fPIC", "-O1", "-o", folder / "reproducible.so", HERE / "reproducible.c"])
        out.write_bytes(_common([_build(folder, number) for number in range(_NUM_BUILDS)]))


def precompile(wasm: bytes) -> dict[str, MachineCode]:
    """Machine code: an interpreter takes too long to compile for whoever waits for it."""
    from dev.controllers.sources.pyctrl.precompile import machine_code

    return machine_code(wasm)


def _build(folder: Path, number: int) -> bytes:
    """One picture, taken in a folder of its own."""
    place = folder / str(number)
    shutil.copytree(HERE / "guest", place / "guest", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "lib" / "site-packages").mkdir(parents=True)  # empty, instead of what is installed here
    tool = Path(sysconfig.get_path("scripts")) / "componentize-py"
    preload = str(folder / "reproducible.so")
    environment = {"PATH": os.defpath, "TMPDIR": str(place), "LD_PRELOAD": preload, "VIRTUAL_ENV": str(place)}
    command = [str(tool), "--quiet", "--wit-path", str(WIT), "--world", "controller", "componentize", "app"]
    run([*command, "--python-path", "guest", "--output", "out.wasm"], cwd=place, environment=environment)
    picture = (place / "out.wasm").read_bytes()
    shutil.rmtree(place)
    return picture


def _common(pictures: list[bytes]) -> bytes:
    """What all pictures show, zeros elsewhere. Raises `InvalidRequest` if that is more than traces."""
    first, *others = pictures
    common = bytearray(first)
    num_traces = 0
    for other in others:
        if len(other) != len(first):
            raise InvalidRequest(f"two builds of pyctrl have {len(first)} and {len(other)} bytes: not reproducible")
        for start in range(0, len(first), _CHUNK):
            if first[start : start + _CHUNK] != other[start : start + _CHUNK]:
                for place in range(start, min(start + _CHUNK, len(first))):
                    if first[place] != other[place]:
                        common[place] = 0
                        num_traces += 1
    if num_traces > _MAX_TRACES:
        raise InvalidRequest(f"two builds of pyctrl differ in {num_traces} bytes: not reproducible")
    return bytes(common)
