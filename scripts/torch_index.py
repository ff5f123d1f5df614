"""Print pip's arguments for the package index of PyTorch, which `make` passes on: nothing, or the index of wheels
without CUDA.

On Linux, PyPI's wheel of PyTorch requires gigabytes of CUDA packages, which a machine without an NVIDIA driver cannot
use. This script first checks that the index answers, because pip retries an unreachable index for minutes. If the index
does not answer, pip uses its configured index. Standard library only: nothing is installed yet.

    python scripts/torch_index.py INDEX      # prints arguments for `pip install`; what happens, to standard error
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PROC = Path("/proc/driver/nvidia/version")
#: Seconds for an index to answer, with its name to be looked up.
PATIENCE = 5


def has_torch() -> bool:
    """Return whether this Python already has the pinned version of torch, in any build; pip then keeps it."""
    pinned = re.findall(r"^torch==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        return importlib.metadata.version("torch").partition("+")[0] in pinned
    except importlib.metadata.PackageNotFoundError:
        return False


def has_nvidia_driver() -> bool:
    if PROC.exists():
        return True
    program = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    try:
        return program is not None and not subprocess.run([program, "-L"], capture_output=True, timeout=30).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def trouble_with(index: str) -> str | None:
    """Return the reason why pip would not find torch in that index; None if it would find torch."""
    found: list[str | None] = [f"no answer within {PATIENCE} seconds"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=PATIENCE) as answer:
                found[0] = None if b"torch-" in answer.read(1 << 20) else "it has no torch"
        except (OSError, ValueError) as error:
            found[0] = str(getattr(error, "reason", error))

    # A thread, because looking up a name heeds no timeout. One that is late is left behind.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return found[0]


def main(index: str) -> None:
    if not index or sys.platform != "linux" or has_torch() or has_nvidia_driver():
        return
    if trouble := trouble_with(index):
        print(
            f"{index} cannot be used ({trouble}): pip's own indexes decide, whose PyTorch may include CUDA.",
            file=sys.stderr,
        )
        return
    print("No NVIDIA driver: PyTorch comes without CUDA.", file=sys.stderr)
    print("--extra-index-url", index)


if __name__ == "__main__":
    main(*sys.argv[1:])
