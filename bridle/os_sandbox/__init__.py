"""A second sandbox around untrusted work. The operating system enforces this sandbox, even if the first sandbox (such
as Wasm) is broken.

Before a process works for a client, it calls `enter`. A restricted process can only read permitted files; it cannot
write or create files. A restricted process cannot use the network, start programs, or signal and inspect other
processes. The restrictions cannot be undone. Importing this package loads only the standard library.

The environment variable `BRIDLE_SANDBOX` sets the mode: `strict` (all mechanisms, or the process does not start),
`best` (the mechanisms that the kernel has) or `off`.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "BRIDLE_SANDBOX"
MODES = ("strict", "best", "off")
#: Requirements of each mechanism, for messages.
_NEEDS = {
    "Landlock": "Linux 5.13 or newer with `landlock` among its security modules",
    "seccomp": "Linux with seccomp filters, on x86-64 or ARM64",
}
_NEW_USER, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000


@dataclass(frozen=True, slots=True)
class Walls:
    """The sandbox mechanisms that this machine supports. `landlock` is the version of Landlock's interface; 0 if the
    kernel lacks Landlock."""

    landlock: int
    has_seccomp: bool

    @property
    def missing(self) -> dict[str, str]:
        """Return the missing mechanisms by name, each with its requirements."""
        present = {"Landlock": self.landlock > 0, "seccomp": self.has_seccomp}
        return {name: _NEEDS[name] for name, is_there in present.items() if not is_there}


@cache
def available_walls() -> Walls:
    """Return the sandbox mechanisms that this machine supports."""
    if sys.platform != "linux":
        return Walls(0, has_seccomp=False)
    from bridle.os_sandbox import landlock
    from bridle.os_sandbox.syscalls import system_calls

    has_filter = "Seccomp:" in Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return Walls(landlock.version(), has_seccomp=has_filter and system_calls() is not None)


def mode(environment: Mapping[str, str] = os.environ) -> str:
    """Return the sandbox mode from the environment. An unknown value counts as `strict`, because a typo must not turn
    the sandbox off."""
    word = environment.get(VARIABLE, "best")
    return word if word in MODES else "strict"


def choose(wanted: str) -> None:
    """Set the sandbox mode of this process and of all processes that it starts. Raises `InvalidRequest` for `strict` if
    a mechanism is missing."""
    from bridle.errors import InvalidRequest

    problem = _obstacle(wanted)
    if problem is not None:
        raise InvalidRequest(f"sandbox is {wanted!r}, but {problem}; `best` uses the mechanisms that exist", "sandbox")
    os.environ[VARIABLE] = wanted


def _obstacle(wanted: str) -> str | None:
    missing = available_walls().missing if wanted == "strict" else {}
    return "; ".join(f"{name} is missing here: it needs {needs}" for name, needs in missing.items()) or None


def enter(*, readable: Iterable[Path] = (), may_fork: bool = False) -> None:
    """Restrict this process for the rest of its life, according to `mode()`. The process must not have started threads
    yet.

    `readable` are files and folders that the process may still read, in addition to those of Python. `may_fork` allows
    further processes, which inherit the restrictions. Raises `OSError` if the kernel has a mechanism, but activating it
    fails.
    """
    wanted = mode()
    if wanted == "off":
        return
    problem = _obstacle(wanted)
    if problem is not None:
        raise OSError(problem)
    walls = available_walls()
    if len(walls.missing) == len(_NEEDS):
        return
    from bridle.os_sandbox import kernel, landlock, seccomp

    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if walls.landlock:
        landlock.restrict([*python_folders(), *readable])
    if walls.has_seccomp:
        seccomp.install(seccomp.filter_of_machine(may_fork=may_fork))


def preload() -> None:
    """Do the preparations of `enter` in advance, so that they are not repeated in each forked process."""
    if mode() != "off" and available_walls().has_seccomp:
        from bridle.os_sandbox import kernel, landlock, seccomp  # noqa: F401

        python_folders()
        for may_fork in (True, False):
            seccomp.filter_of_machine(may_fork=may_fork)


def leave_namespaces() -> bool:
    """Move this process, and all that it starts, to a network without interfaces. Returns whether the kernel permits
    the move; in many containers the kernel forbids it. The process must not have threads."""
    if mode() == "off" or sys.platform != "linux":
        return False
    from bridle.os_sandbox import kernel

    try:
        kernel.unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC)
    except OSError:
        return False
    return True


@cache
def python_folders() -> tuple[Path, ...]:
    """Return the folders from which Python modules are imported: those of this interpreter, of installed packages, and
    of bridle. Folders with packages of the user, or of a parent environment, are taken from `sys.path`. Other folders
    in `sys.path`, such as the current folder, are left out, because they may contain any file."""
    found = [Path(os.__file__).parent, *map(Path, site.getsitepackages()), Path(__file__).resolve().parent.parent]
    found += [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    return tuple(dict.fromkeys(found))


def explain_end(status: int) -> str | None:
    """Return the sandbox's explanation of a negative exit status, or None."""
    import signal

    if status != -getattr(signal, "SIGSYS", 0) or not status:
        return None
    return (
        "it made a system call that the sandbox forbids, and the kernel ended it (SIGSYS). If this was no attack, "
        f"report it with the kernel's audit line (dmesg, type=1326); {VARIABLE}=off switches the sandbox off"
    )
