"""Tests that the operating system refuses an intruder's actions inside each kind of process that works for clients."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from bridle import os_sandbox
from bridle.aici.runtime import fork_server
from bridle.errors import InvalidRequest
from bridle.os_sandbox import seccomp
from bridle.os_sandbox.syscalls import system_calls
from tests.os_sandbox.attacks import ATTACKS
from tests.sources import ROOT
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    bool(os_sandbox.available_walls().missing), reason="this kernel lacks Landlock or seccomp"
)

REFUSED = {
    f"ended {-signal.SIGSYS}",
    *(f"refused {error}" for error in (errno.EPERM, errno.EACCES, errno.ENOSYS)),
}


@cache
def outcomes(*names: str, mode: str = "strict") -> dict[str, dict[str, str]]:
    """Return the result of each attack, or of the named attacks, by kind of process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.os_sandbox.process_kinds", *names],
        cwd=ROOT,
        env=os.environ | {os_sandbox.VARIABLE: mode, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kind", ["worker", "compiler", "template", "grammar", "writer"])
def test_every_attack_is_refused(kind: str) -> None:
    found = outcomes()[kind]
    assert set(found) == set(ATTACKS)
    assert {name: how for name, how in found.items() if how not in REFUSED} == {}


def test_the_same_attacks_succeed_without_the_walls() -> None:
    """The attacks succeed without the sandbox, so the refusals come from the sandbox, and not from the machine."""
    found = outcomes("read_a_file", "list_a_folder", "write_a_file", mode="off")["template"]
    assert all(how.startswith("gained") for how in found.values()), found


def test_a_call_that_nobody_makes_ends_the_process_and_the_log_says_why() -> None:
    assert outcomes()["worker"]["start_a_program"] == f"ended {-signal.SIGSYS}"
    text = os_sandbox.explain_end(-signal.SIGSYS)
    assert text is not None and "SIGSYS" in text and os_sandbox.VARIABLE in text
    assert os_sandbox.explain_end(-signal.SIGKILL) is None
    assert os_sandbox.explain_end(0) is None


def test_the_log_tells_of_a_child_that_the_sandbox_ended(caplog: pytest.LogCaptureFixture) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSYS)"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    until(lambda: fork_server.bury_children(0, None) or caplog.records)
    assert f"runtime process {pid} ended: it made a system call that the sandbox forbids" in caplog.text


def test_a_process_that_may_not_fork_has_no_call_for_it() -> None:
    """If a process may not fork, `clone` is permitted only for threads, and `wait4` is forbidden."""
    calls = system_calls()
    assert calls is not None
    alone, forking = (set(seccomp.make_filter(calls, may_fork=may_fork)) for may_fork in (False, True))
    wait = seccomp.Instruction(seccomp.IF_EQUAL, calls.forking["wait4"], if_false=1)
    assert wait in forking and wait not in alone


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_call_is_both_permitted_and_fatal(machine: str) -> None:
    calls = system_calls(machine)
    assert calls is not None
    numbers = [number for group in calls[1:] for number in group.values()]
    assert len(numbers) == len(set(numbers))
    assert {"read", "futex", "mmap", "exit_group"} <= set(calls.permitted)


def test_an_unknown_machine_has_no_table() -> None:
    assert system_calls("riscv64") is None


def test_strict_is_refused_where_a_wall_is_missing() -> None:
    bare = os_sandbox.Walls(landlock=0, has_seccomp=True)
    with patch.object(os_sandbox, "available_walls", lambda: bare), patch.dict(os.environ):
        os_sandbox.choose("best")
        with pytest.raises(InvalidRequest, match=r"sandbox is 'strict', but Landlock is missing here: it needs Linux"):
            os_sandbox.choose("strict")
        assert os_sandbox.mode() == "best"


def test_a_misspelled_mode_lets_no_wall_fall() -> None:
    assert os_sandbox.mode({os_sandbox.VARIABLE: "offf"}) == "strict"
    assert os_sandbox.mode({}) == "best"


def test_workers_have_a_network_without_interfaces() -> None:
    """Workers get their own network namespace if the kernel permits it. Otherwise, only the system call filter protects
    them."""
    code = (
        "from bridle import os_sandbox; import socket\n"
        "print(os_sandbox.leave_namespaces(), [name for _, name in socket.if_nameindex()])"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    if done.stdout.startswith("False"):
        pytest.skip("this machine permits no namespaces")
    assert done.stdout.split() == ["True", "['lo']"]


def test_packages_of_a_user_stay_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of `pip install --user` stays readable; other folders of Python's path do not."""
    packages, other = tmp_path / "site-packages", tmp_path / "other"
    monkeypatch.setattr(sys, "path", [str(packages), str(other), *sys.path])
    found = os_sandbox.python_folders.__wrapped__()
    assert packages in found and other not in found
