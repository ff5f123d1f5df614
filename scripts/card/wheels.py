"""The packages that the validation of a GPU needs and that the GPU machine's image lacks; `scripts/card-wheels` fetches
them.

They are the requirements of bridle and its tests, without the packages that the image has, whose names are in
`image.txt`. The checkout and the wheels are sent together, so the size of both is limited.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
#: Bytes that travel together, and of those the wheels'.
LIMIT, WHEELS = 64 << 20, 20 << 20
#: Requirements of bridle that its server alone imports.
SERVER = ("fastapi", "httptools", "pydantic", "starlette", "uvicorn", "websockets")
#: The extra of bridle whose packages come with those of the server: Wasm controllers.
CONTROLLERS = "aici"
#: What its tests marked `gpu` need.
TESTS = ("hypothesis", "httpx", "peft", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
#: What the image has in a version that is too old for the packages that come along.
TOO_OLD = {"typing-extensions"}
#: The machine, for conditions of requirements.
_MACHINE = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "extra": ""}
_MACHINE |= {"platform_machine": "x86_64", "platform_python_implementation": "CPython", "platform_system": "Linux"}


def needed(*, serve: bool) -> list[str]:
    """Return the names of the packages to send; `serve` includes those of the server and of Wasm controllers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    roots = [Requirement(line).name for line in project["dependencies"]]
    roots = [name for name in roots if serve or canonicalize_name(name) not in SERVER]
    roots += [Requirement(line).name for line in project["optional-dependencies"][CONTROLLERS] if serve]
    return sorted(missing([*roots, *TESTS], image()))


def image() -> set[str]:
    """Return the names of the packages in the image."""
    names = (Path(__file__).parent / "image.txt").read_text(encoding="utf-8").split()
    return {canonicalize_name(name) for name in names}


def missing(roots: Iterable[str], there: set[str]) -> set[str]:
    """Return `roots` and all their requirements, except packages that are in `there`."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in roots]
    while left:
        name = left.pop()
        if name in found or (name in there and name not in TOO_OLD):
            continue
        found.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(_MACHINE):
                left.append(canonicalize_name(requirement.name))
    return found


def tree_bytes() -> int:
    """Return the total bytes of the files that git tracks."""
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, check=True).stdout
    return sum((ROOT / name).stat().st_size for name in listed.decode().split("\0") if name and (ROOT / name).is_file())


def problem(folder_bytes: int, tree: int) -> str | None:
    """Return the reason why wheels and checkout are too large to be sent, or None."""
    if folder_bytes > WHEELS:
        return f"the wheels have {folder_bytes} bytes; at most {WHEELS} leave room for the checkout"
    if folder_bytes + tree > LIMIT:
        return f"wheels and checkout have {folder_bytes + tree} bytes; at most {LIMIT} travel"
    return None


def main(arguments: Sequence[str]) -> int:
    if arguments[0] == "list":
        # As they are here: some want another one's exact version.
        print("\n".join(f"{name}=={version(name)}" for name in needed(serve="--serve" in arguments)))
        return 0
    files = list(Path(arguments[1]).glob("*.whl"))
    size, tree = sum(path.stat().st_size for path in files), tree_bytes()
    print(f"{arguments[1]}: {len(files)} wheels, {size >> 10} KiB; with the checkout {(size + tree) >> 10} KiB")
    found = problem(size, tree)
    if found is not None:
        print(found, file=sys.stderr)
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
