"""`make controllers`: build the standard controllers from their pinned sources and compare them with the shipped ones.

Every folder `sources/NAME` has a `build.py` that defines:

* `build(out: Path) -> None`: write the module to `out`, in a temporary place, leaving nothing behind;
* `SOURCES: dict[str, str]`: the downloads, `NAME==VERSION` on a package registry with its SHA-256 (may be empty);
* `TOOLS: dict[str, str]`: the Python packages that build, with their versions;
* optionally `precompile(wasm: bytes) -> dict[str, Code]`: machine code, by the compiler settings for which it is made.

The same sources and tools give the same bytes, so anyone can rebuild a shipped file to verify it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import lzma
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from bridle.controllers.standard import FOLDER, MANIFEST, MAX_BYTES, ShippedCode, StandardModule, manifest
from bridle.errors import BridleError, InvalidRequest
from dev.controllers import SOURCES

_PRESET = 9 | lzma.PRESET_EXTREME
#: With this filter the addresses in calls compress better.
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": _PRESET}]


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Machine code. `label` is the readable name of the machine. `facts` is what the compiler found out about the
    module, as JSON."""

    label: str
    code: bytes
    facts: str


@dataclass(frozen=True, slots=True)
class Built:
    """A module that was just built, to be compared with the shipped module of the same name."""

    name: str
    wasm: bytes
    seconds: float
    sources: dict[str, str]
    tools: dict[str, str]
    code: dict[str, MachineCode] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return _digest(self.wasm)

    @property
    def verdict(self) -> str:
        """The result of the comparison: `same`, `differs` or `new`."""
        shipped = manifest().get(self.name)
        if shipped is None:
            return "new"
        mine = {settings: _digest(made.code) for settings, made in self.code.items()}
        theirs = {settings: code.sha256 for settings, code in shipped.code.items()}
        return "same" if (shipped.sha256, theirs) == (self.sha256, mine) else "differs"


def buildable() -> tuple[str, ...]:
    """Return the names of the controllers that have sources."""
    return tuple(sorted(path.parent.name for path in SOURCES.glob("*/build.py")))


def build(name: str) -> Built:
    """Build one controller. Raises `InvalidRequest` if there is no such controller or its tools are missing."""
    if name not in buildable():
        raise InvalidRequest(f"no sources of a controller {name!r}; there are {', '.join(buildable())}", "NAME")
    recipe = recipe_of(name)
    _check_tools(name, recipe.TOOLS)
    with tempfile.TemporaryDirectory(prefix="bridle-build-") as folder:
        out = Path(folder) / f"{name}.wasm"
        begin = time.monotonic()
        recipe.build(out)
        wasm = out.read_bytes()
        code = recipe.precompile(wasm) if hasattr(recipe, "precompile") else {}
        seconds = time.monotonic() - begin
    if len(wasm) > MAX_BYTES:
        raise InvalidRequest(f"{name} has {len(wasm)} bytes; a standard controller has at most {MAX_BYTES}", "NAME")
    return Built(name, wasm, seconds, recipe.SOURCES, recipe.TOOLS, code)


def recipe_of(name: str) -> Any:
    """Return the module `sources/NAME/build.py`."""
    return importlib.import_module(f"dev.controllers.sources.{name}.build")


def _check_tools(name: str, tools: dict[str, str]) -> None:
    for tool, wanted in tools.items():
        try:
            found = version(tool)
        except PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            raise InvalidRequest(
                f"{name} is built with {tool} {wanted}, here it is {found}: `pip install '{tool}=={wanted}'`"
            )


def write(built: Built) -> None:
    """Ship a built module: write its file, and then its entry in the manifest."""
    file = f"{built.name}.wasm.xz"
    packed = lzma.compress(built.wasm, preset=_PRESET)
    (FOLDER / file).write_bytes(packed)
    code = {settings: _write_code(built.name, made) for settings, made in built.code.items()}
    entries = dict(manifest())
    entries[built.name] = StandardModule(
        file=file,
        sha256=built.sha256,
        xz_sha256=_digest(packed),
        bytes=len(built.wasm),
        sources=built.sources,
        tools=built.tools,
        code=code,
    )
    MANIFEST.write_bytes(msgspec.json.format(msgspec.json.encode(entries, order="sorted"), indent=2) + b"\n")
    manifest.cache_clear()


def _write_code(name: str, made: MachineCode) -> ShippedCode:
    file = f"{name}.{made.label}.code.xz"
    packed = lzma.compress(made.code, filters=_FILTERS)
    (FOLDER / file).write_bytes(packed)
    return ShippedCode(
        file=file, sha256=_digest(made.code), xz_sha256=_digest(packed), bytes=len(made.code), facts=made.facts
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Build controllers, print a table, and with `--write` ship new modules. The exit code is 1 if a built module
    differs from the shipped one."""
    parser = argparse.ArgumentParser(prog="make controllers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones; all if none is named")
    parser.add_argument("--write", action="store_true", help="ship what was built")
    options = parser.parse_args(arguments)
    print(f"{'controller':<12} {'bytes':>10} {'shipped':>10} {'seconds':>8}  sha256        verdict")
    verdicts = []
    try:
        for name in options.names or buildable():
            built = build(name)
            verdicts.append(built.verdict)
            shipped = manifest().get(name)
            sizes = f"{len(built.wasm):>10} {shipped.bytes if shipped else '-':>10} {built.seconds:>8.1f}"
            print(f"{name:<12} {sizes}  {built.sha256[:12]}  {built.verdict}", flush=True)
            if options.write and built.verdict != "same":
                write(built)
    except BridleError as error:
        print(f"bridle: {error}", file=sys.stderr)
        return 2
    return 0 if options.write or set(verdicts) <= {"same"} else 1


if __name__ == "__main__":
    sys.exit(main())
