"""A program that runs each attack in a process of each kind, and prints the results as JSON. The processes enter the
sandbox through the product's own code, and only their later work is replaced. The program runs separately because a
process with threads cannot fork or be restricted safely."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from bridle import os_sandbox
from bridle.aici.runtime import compiler as module_compiler
from bridle.aici.runtime import fork_server
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.loaded_module import GuestEnvironment
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.http.writers import process
from bridle.structured_output import compile_worker
from bridle.tokenizer import template_engine
from tests.os_sandbox.attacks import ATTACKS, run_attack

Work = Callable[[], None]
_GUESTS = GuestEnvironment(RuntimeVocabulary([b"\0"], 0, lambda text: [0]), DEFAULT_LIMITS)


def worker(attack: Work) -> None:
    """Run an attack as a process that hosts Wasm controllers."""
    with patch.object(fork_server, "be_worker", lambda *_: attack()):
        fork_server.run_child("worker", [], _GUESTS, Sandbox(DEFAULT_LIMITS), Path("compiled"))


def compiler(attack: Work) -> None:
    """Run an attack as a process that compiles an uploaded controller."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target, ours:
        descriptors = [source.fileno(), target.fileno(), theirs.detach()]
        with patch.object(module_compiler, "compile_module", lambda *_: attack()):
            fork_server.run_child("compiler", descriptors, _GUESTS, Sandbox(DEFAULT_LIMITS), Path("compiled"))


def template(attack: Work) -> None:
    """Run an attack as a process that renders a client's chat template."""
    task = {"source": "", "variables": {}, "limits": [1, 1], "memory": 1 << 40, "seconds": 5}
    with (
        patch.object(sys, "stdin", io.StringIO(json.dumps(task))),
        patch.object(template_engine, "ChatTemplateProgram", lambda *_: attack()),
    ):
        template_engine.main()


def grammar(attack: Work) -> None:
    """Run an attack as a process that compiles a client's grammar in a thread."""
    with patch.object(compile_worker, "serve", attack):
        compile_worker.main()


def writer(attack: Work) -> None:
    """Run an attack as a process that writes streams to clients."""
    ours, theirs = socket.socketpair()
    os.dup2(theirs.fileno(), 0)
    with (
        ours,
        patch.object(sys, "argv", ["", str(os.getppid())]),
        patch.object(process.Writer, "run", lambda _: attack()),
    ):
        process.main()


KINDS: dict[str, Callable[[Work], None]] = {
    kind.__name__: kind for kind in (worker, compiler, template, grammar, writer)
}


def outcome(kind: Callable[[Work], None], name: str) -> str:
    """Run an attack in a process of the given kind. Returns its report, or the signal that ended the process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            kind(lambda: run_attack(name, writing))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        report = file.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return report or f"ended {status}"


def main() -> None:
    """Run the named attacks, or all attacks, in a process of each kind."""
    os_sandbox.preload()
    names = sys.argv[1:] or ATTACKS
    json.dump({key: {name: outcome(kind, name) for name in names} for key, kind in KINDS.items()}, sys.stdout)


if __name__ == "__main__":
    main()
