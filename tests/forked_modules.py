"""Processes of `python -m MODULE` that tests start, without the seconds that their imports take.

A process that has imported the module forks for each of them. The fork is a child of the test's process, with the
arguments, folder, variables and files of the call: the caller sees no difference. Processes of programs that tests
start are not forked.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

#: Modules that are started often, and what else their process imports before it forks.
MODULES = {
    "bridle.aici.runtime": ("bridle.aici.runtime.main", "bridle.aici.runtime.worker"),
    "bridle.launch.replica_process": (),
    "tests.distributed.scripted_ranks": (),
    "tests.launch.scripted_replica": (),
    "tests.launch.scripted_shard": (),
}
#: The processes that fork. They live as long as this one, whichever test needed them first.
pids: set[int] = set()

_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_SUBREAPER = 36  # Linux's PR_SET_CHILD_SUBREAPER
_lock = threading.Lock()
_execute = subprocess.Popen._execute_child


def install() -> None:
    """Let `subprocess.Popen` fork these modules, where a process can get another parent."""
    if sys.platform == "linux":
        subprocess.Popen._execute_child = _start


def _start(self: Any, words: Any, *rest: Any) -> None:
    if not isinstance(words, list | tuple) or [*words[:2]] != [sys.executable, "-m"] or words[2] not in MODULES:
        _execute(self, words, *rest)
        return
    given = inspect.signature(_execute).bind(self, words, *rest).arguments
    ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    call = [[*map(os.fspath, words[3:])], str(given["cwd"] or os.getcwd()), dict(given["env"] or os.environ)]
    template = _template(words[2], os.getpid())
    self.pid = template.fork(call, [number if end == -1 else end for number, end in enumerate(ends)])
    self._child_created = True
    self._close_pipe_fds(*(given[name] for name in _PIPES))


class _Template:
    """The process that forks, a child of this one. It ends with this one."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.forked_modules", module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        pids.add(self._process.pid)

    def fork(self, call: Sequence[object], files: Sequence[int]) -> int:
        """Return the process id of the fork."""
        with _lock:
            _adopt(True)  # the fork's parent ends at once, and this process takes its place
            try:
                socket.send_fds(self._socket, [json.dumps(call).encode()], files)
                return int(self._socket.recv(16))
            finally:
                _adopt(False)


@cache
def _template(module: str, _process: int) -> _Template:
    return _Template(module)


def _adopt(orphans: bool) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, int(orphans), 0, 0, 0)


def _serve(module: str, server: socket.socket) -> None:
    """Fork for each call. Returns in the fork, when its parent is the process that called."""
    for name in (module, *MODULES[module]):
        import_module(name)
    if not hasattr(sys.modules[module], "__path__"):
        del sys.modules[module]  # it is to run as a program
    parent = os.getppid()
    while True:
        message, files, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not message:
            os._exit(0)
        if _fork(server):
            break
        for file in files:
            os.close(file)
    server.close()
    while os.getppid() != parent:
        time.sleep(0.0005)
    _take_over(files, *json.loads(message))


def _fork(server: socket.socket) -> bool:
    """Fork twice, and report the second fork when the first one has ended. Returns whether this is the second one."""
    read, write = os.pipe()
    with open(read, "rb") as reading, open(write, "wb", buffering=0) as writing:
        if between := os.fork():
            os.waitpid(between, 0)
            writing.close()
            server.send(reading.read())
            return False
        if child := os.fork():
            writing.write(str(child).encode())
            os._exit(0)
    return True


def _take_over(files: Sequence[int], words: list[str], folder: str, variables: dict[str, str]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[1:] = words


if __name__ == "__main__":
    started = sys.argv[1]
    _serve(started, socket.socket(fileno=int(sys.argv[2])))
    runpy.run_module(started, run_name="__main__", alter_sys=True)
