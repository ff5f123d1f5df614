"""`make kernels`: compile the kernels for every instruction set and compare them with the shipped ones.

The same sources and the same compiler give the same bytes, so anyone can rebuild a shipped object to verify it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from bridle.cpu_kernels.isa_targets import MANIFEST, OBJECTS, SOURCES, TARGETS, IsaTarget
from bridle.errors import BridleError, InvalidRequest
from dev.cpu_kernels.zig import ZIG, zig_cc

#: Products and sums are never fused into one rounding unless the source does so explicitly.
FLAGS = (
    *("-std=c11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-g0", "-s"),
    *("-ffp-contract=off", "-fno-sanitize=undefined", "-fno-math-errno"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
)


def compile_object(target: IsaTarget, out: Path, flags: Sequence[str] = FLAGS) -> None:
    """Write the object of `target` to `out`. Raises `InvalidRequest` if the compiler is not the pinned one."""
    try:
        found = version("ziglang")
    except PackageNotFoundError:
        found = "not installed"
    if found != ZIG:
        raise InvalidRequest(
            f"kernels are built with ziglang {ZIG}, here it is {found}: `pip install 'ziglang=={ZIG}'`"
        )
    zig_cc([*target.flags, *flags, "-o", out, "bridle.c", "-lpthread", "-lm"], cwd=SOURCES)


def build(target: IsaTarget) -> bytes:
    """Build the object of `target`; return its bytes."""
    with tempfile.TemporaryDirectory(prefix="bridle-kernels-") as folder:
        out = Path(folder) / "kernels.so"
        compile_object(target, out)
        return out.read_bytes()


def shipped_hashes() -> dict[str, str]:
    """Return the SHA-256 by name of the objects that the manifest lists."""
    return msgspec.json.decode(MANIFEST.read_bytes(), type=dict[str, str]) if MANIFEST.exists() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build kernels, print a table, and with `--write` ship new objects. The exit code is 1 if a built object differs
    from the shipped one."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="make kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; or all")
    parser.add_argument("--write", action="store_true", help="ship what was built")
    options = parser.parse_args(arguments)
    print(f"{'object':<14} {'bytes':>8} {'seconds':>8}  sha256        verdict")
    hashes, is_same = shipped_hashes(), True
    try:
        for name in set(options.names) - set(names):
            raise InvalidRequest(f"no kernels {name!r}; there are {', '.join(names)}", "NAME")
        for target in TARGETS:
            if options.names and target.name not in options.names:
                continue
            begin = time.monotonic()
            data = build(target)
            sha256 = hashlib.sha256(data).hexdigest()
            verdict = "same" if hashes.get(target.name) == sha256 else "differs" if target.name in hashes else "new"
            is_same = is_same and verdict == "same"
            print(
                f"{target.name:<14} {len(data):>8} {time.monotonic() - begin:>8.1f}  {sha256[:12]}  {verdict}",
                flush=True,
            )
            if options.write and (verdict != "same" or not target.path.exists()):
                OBJECTS.mkdir(exist_ok=True)
                target.path.unlink(missing_ok=True)  # processes that have loaded the old object keep it
                target.path.write_bytes(data)
                hashes[target.name] = sha256
                MANIFEST.write_bytes(msgspec.json.format(msgspec.json.encode(hashes, order="sorted"), indent=2) + b"\n")
    except BridleError as error:
        print(f"bridle: {error}", file=sys.stderr)
        return 2
    return 0 if options.write or is_same else 1


if __name__ == "__main__":
    sys.exit(main())
