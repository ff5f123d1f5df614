"""Attacks that an intruder would try inside a sandboxed process. Each function returns the gained access, or raises the
kernel's refusal."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

_ANYWHERE = Path(tempfile.gettempdir())  # where anybody may write
#: Numbers of calls on x86-64 and ARM64.
_NUMBERS = {
    "ptrace": (101, 117),
    "mount": (165, 40),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "process_vm_readv": (310, 270),
    "tgkill": (234, 131),
    "unshare": (272, 97),
}


def _call(name: str, *arguments: int) -> int:
    number = _NUMBERS[name][platform.machine() != "x86_64"]
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def read_a_file() -> object:
    return Path("/etc/passwd").read_text(encoding="utf-8")


def list_a_folder() -> object:
    return os.listdir("/")


def read_the_parents_memory() -> object:
    return os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY)


def write_a_file() -> object:
    path = _ANYWHERE / f"bridle-attack-{os.getpid()}"
    opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    path.unlink()
    return opened


def change_a_module() -> object:
    return os.open(os.__file__, os.O_WRONLY)


def remove_a_file() -> object:
    os.unlink(os.__file__ + ".not-there")
    return None


def reach_the_network() -> object:
    return socket.create_connection(("127.0.0.1", 9), timeout=1)


def start_a_program() -> object:
    os.execv("/bin/true", ["true"])


def end_the_parent() -> object:
    os.kill(os.getppid(), signal.SIGTERM)
    return None


def end_the_parents_thread() -> object:
    return _call("tgkill", os.getppid(), os.getppid(), signal.SIGTERM)


def limit_the_parent() -> object:
    return resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))


def trace_the_parent() -> object:
    return _call("ptrace", 16, os.getppid(), 0, 0)


def copy_the_parents_memory() -> object:
    return _call("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0)


def mount_a_folder() -> object:
    return _call("mount", 0, 0, 0, 0, 0)


def make_a_namespace() -> object:
    return _call("unshare", 0x10000000)


def load_a_kernel_program() -> object:
    return _call("bpf", 0, 0, 0)


def read_the_key_ring() -> object:
    return _call("keyctl", 0, 0, 0)


def make_an_io_ring() -> object:
    return _call("io_uring_setup", 1, 0)


ATTACKS: dict[str, Callable[[], object]] = {
    attack.__name__: attack
    for attack in (
        *(read_a_file, list_a_folder, read_the_parents_memory, write_a_file, change_a_module, remove_a_file),
        *(reach_the_network, start_a_program, end_the_parent, end_the_parents_thread, limit_the_parent),
        *(trace_the_parent, copy_the_parents_memory, mount_a_folder, make_a_namespace, load_a_kernel_program),
        *(read_the_key_ring, make_an_io_ring),
    )
}


def run_attack(name: str, report: int) -> None:
    """Run an attack, and write its result to the file descriptor `report`. A fatal attack writes nothing."""
    try:
        gained = ATTACKS[name]()
    except OSError as error:
        os.write(report, f"refused {error.errno}".encode())
    else:
        os.write(report, f"gained {gained!r}".encode())
