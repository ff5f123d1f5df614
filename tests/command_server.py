"""Run `bridle` commands without the seconds of their imports, for tests that run many commands. A process that has
imported everything forks for each command. A command has the arguments, folder, variables and files of its caller. All
processes of one test run share the importing process, which ends with the run."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Self

from tests.fakes.made_once import SHARED, shared_folder
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
_ADDRESS = "s"
#: The program `bridle`. It runs without the packages of its environment, so that it starts at once.
_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(os.path.join(os.path.dirname(os.path.realpath(__file__)), {address!r}))
    message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [message], [0, 1, 2])
    server.recv(16)
    sys.exit(int(server.recv(16)))
"""


@cache
def command_folder() -> Path:
    """Return a folder for the shell's PATH, in which the program `bridle` runs in a fork of the shared process."""
    return shared_folder("commands", "", _begin)


def _begin(folder: Path) -> None:
    program = folder / "bridle"
    program.write_text(_CLIENT.format(python=sys.executable, address=_ADDRESS))
    program.chmod(0o755)
    words = [sys.executable, "-m", "tests.command_server", str(folder / _ADDRESS)]
    server = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    server.stdout.close()
    _servers.append(server)  # which ends by itself


_servers: list[subprocess.Popen[bytes]] = []


class Command:
    """A running command, which is not a child of this process. A module name after `-m` runs instead of `bridle`."""

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        stdout: int,
        *,
        stdin: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.settimeout(PATIENCE)
        self._server.connect(str(command_folder() / _ADDRESS))
        message = json.dumps([list(words), str(ROOT), dict(variables)]).encode()
        with open(os.devnull, "r+b") as null:
            files = [null.fileno() if file is None else file for file in (stdin, stdout, stderr)]
            socket.send_fds(self._server, [message], files)
        self.pid = int(self._server.recv(16))

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait until the command has ended; may be called once. Returns the command's exit status."""
        with self._server:
            return int(self._server.recv(16))


class PipedCommand(Command):
    """A command whose input, output and errors are pipes. Use it in a `with` block, whose end ends the command."""

    def __init__(self, words: Sequence[str]) -> None:
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        (stdin, feed), (read, stdout), (hear, stderr) = (os.pipe() for _ in range(3))
        super().__init__(words, variables, stdout, stdin=stdin, stderr=stderr)
        for end in (stdin, stdout, stderr):
            os.close(end)
        self.stdin, self.stdout, self.stderr = os.fdopen(feed, "w"), os.fdopen(read), os.fdopen(hear)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.send_signal(signal.SIGKILL)
        self._server.close()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


def _serve(address: str) -> int:
    """Fork for each command. Returns in the forked process with the command's exit status, and in the server when the
    tests are over."""
    from bridle.cli import main

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        main(["generate", "demo", "Once", "--max-tokens", "1"])  # imports torch, and what a model needs
    import_module("bridle.http.server.run")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(1.0)
        print("ready", flush=True)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if not Path(os.environ[SHARED]).exists():
                    return 0
                continue
            if not os.fork():
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.setblocking(True)
    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if command := os.fork():
        connection.send(str(command).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
        with suppress(OSError):  # nobody waits for it
            connection.send(str(status).encode())
        os._exit(0)
    connection.close()
    words, folder, variables = json.loads(message)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    if words[0] == "-m":
        sys.argv = words[1:]
        run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    sys.argv = ["bridle", *words]
    return main()


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1]))
