"""A second sandbox around untrusted work: restrictions of the operating system that hold even if the first sandbox
(Wasm, a template sandbox, a grammar compiler) is broken.

A process calls `enter` before it works for a client. After that it cannot write, create or open files, except to read
permitted ones. A restricted process cannot reach the network, start programs, or signal and inspect other processes.
The restrictions cannot be undone. Importing this package loads only the standard library.

`BRIDLE_SANDBOX` sets the strictness: `strict` (all mechanisms, or the process does not start), `best` (the mechanisms
that the kernel has) or `off`.
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
    """The mechanisms that this machine supports. `landlock` is the version of its interface; 0 if it is missing."""

    landlock: int
    has_seccomp: bool

    @property
    def missing(self) -> dict[str, str]:
        """Return the names of missing mechanisms, with the requirements of each."""
        present = {"Landlock": self.landlock > 0, "seccomp": self.has_seccomp}
        return {name: _NEEDS[name] for name, is_there in present.items() if not is_there}


@cache
def available_walls() -> Walls:
    """Return the mechanisms that this machine supports."""
    if sys.platform != "linux":
        return Walls(0, has_seccomp=False)
    from bridle.os_sandbox import landlock
    from bridle.os_sandbox.syscalls import system_calls

    has_filter = "Seccomp:" in Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return Walls(landlock.version(), has_seccomp=has_filter and system_calls() is not None)


def mode(environment: Mapping[str, str] = os.environ) -> str:
    """Return the requested mode. An unknown word counts as `strict`, because a typo must not turn the sandbox off."""
    word = environment.get(VARIABLE, "best")
    return word if word in MODES else "strict"


def choose(wanted: str) -> None:
    """Set the mode of this process and of all processes that it starts. Raises `InvalidRequest` for `strict` if a
    mechanism is missing."""
    from bridle.errors import InvalidRequest

    problem = _obstacle(wanted)
    if problem is not None:
        raise InvalidRequest(f"sandbox is {wanted!r}, but {problem}; `best` runs with the walls that exist", "sandbox")
    os.environ[VARIABLE] = wanted


def _obstacle(wanted: str) -> str | None:
    missing = available_walls().missing if wanted == "strict" else {}
    return "; ".join(f"{name} is missing here: it needs {needs}" for name, needs in missing.items()) or None


def enter(*, readable: Iterable[Path] = (), may_fork: bool = False) -> None:
    """Restrict this process for the rest of its life, as `mode()` says. The process must not have started threads yet.

    `readable` are files and folders that the process may still read, in addition to Python's own. `may_fork` allows
    further processes, which inherit the restrictions. Raises `OSError` if a mechanism that the kernel has cannot be
    activated.
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
    """Do in advance the work that `enter` would otherwise do in each process that is forked later."""
    if mode() != "off" and available_walls().has_seccomp:
        from bridle.os_sandbox import kernel, landlock, seccomp  # noqa: F401

        python_folders()
        for may_fork in (True, False):
            seccomp.filter_of_machine(may_fork=may_fork)


def leave_namespaces() -> bool:
    """Move this process, and all that it starts, to a network without interfaces. Returns whether the kernel permits
    that; in many containers it does not. The process must not have threads."""
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
    """Return the folders from which modules are imported: those of this interpreter, of installed packages, and of
    bridle. Packages of the user, or of another environment below this one, are found only on the path. Other folders of
    the path, such as the current one, are left out, because they may contain any file."""
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
