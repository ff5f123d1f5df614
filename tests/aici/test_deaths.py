"""Tests of `kill -9` for each process of the runtime: only the sequences of the killed process are lost, and no
resource is leaked."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aici.conftest import CAPABLE, VOCAB_SIZE, Start
from tests.aici.guests import END, LOOP, NOOP, guest2, sample, say
from tests.aici.llm_side import Llm, RuntimeDied
from tests.waiting import PATIENCE, until


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_ends_its_tenants_sequences_alone(start: Start) -> None:
    """The sequences of another tenant continue, and a new worker accepts new requests at once."""
    llm = start(*CAPABLE)
    module = llm.upload(guest2([sample([65], VOCAB_SIZE)]))
    llm.start(module, 1, user="eva")
    first = set(llm.workers())
    llm.start(module, 2, user="adam")
    assert len(llm.workers()) == 2
    for pid in first:
        kill(pid)
    until(lambda: not first & set(llm.workers()))
    data = llm.mid({"id": 1, "tokens": [65]}, {"id": 2, "tokens": [65]})
    lost = llm.answer(data, 1)
    assert lost["error"].startswith("Worker:") and lost["result"] is None and lost["logs"].startswith("Worker:")
    assert llm.answer(data, 2)["error"] == ""
    assert llm.start(module, 3, user="eva")["error"] == ""
    llm.mid(freed=(1, 2, 3))


@pytest.mark.slow  # `test_pool_kills.py` kills workers that compute
def test_a_worker_killed_within_a_step(start: Start) -> None:
    limit = 2000 * PATIENCE  # longer than the answer is waited for
    llm = start(*CAPABLE, "--wasm-max-step-time", str(round(limit)))
    llm.start(llm.upload(guest2([NOOP, [LOOP]])), 1)
    (worker,) = llm.workers()
    message = b'{"op":"mid_process","freed":[],"ops":[{"id":1,"backtrack":0,"tokens":[]}]}'
    llm.send("main", message)
    until(lambda: _cpu(worker) > 0.05)  # the guest is at it
    kill(worker)
    reply: dict[str, Any] = json.loads(llm.receive("main"))
    assert reply["data"]["seqs"]["1"]["error"].startswith("Worker:")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_worker_killed_while_it_instantiates(start: Start) -> None:
    llm = start(*CAPABLE, "--wasm-max-init-time", "20000")
    module = llm.upload(guest2([END], create=[LOOP]))
    rid = llm.begin_side(op="instantiate", req_id="r", prompt=[1], module_id=module, module_arg="")
    until(lambda: any(_cpu(pid) > 0.05 for pid in llm.workers()))
    for pid in llm.workers():
        kill(pid)
    reply = llm.end_side(rid)
    assert reply["type"] == "error" and "died" in reply["error"]
    assert llm.start(llm.upload(guest2([NOOP])), 1)["error"] == ""


def test_a_killed_compiler_fails_its_upload_alone(start: Start) -> None:
    """The upload fails with a reason, and the next upload succeeds."""
    llm = start(*CAPABLE)
    llm.main(op="ping")
    slow = guest2([[say(str(i)) for i in range(3)] for _ in range(1500)])
    rid = llm.begin_side(op="mk_module", binary=base64.b64encode(slow).decode())
    until(lambda: bool(llm.workers()))  # the compiler is the nursery's only child
    for pid in llm.workers():
        kill(pid)
    reply = llm.end_side(rid)
    assert reply["type"] == "error", reply
    assert "compiler died" in reply["error"] or "cannot fork a compiler" in reply["error"], reply
    assert llm.upload(guest2([END]))


def test_compiling_is_limited(start: Start) -> None:
    slow = guest2([[say(str(i)) for i in range(3)] for _ in range(1500)])
    upload = {"op": "mk_module", "binary": base64.b64encode(slow).decode()}
    llm = start(*CAPABLE, "--limit", "max_compile_time=30")
    assert "longer than the limit of 30 ms" in llm.side(**upload)["error"]
    until(lambda: not llm.workers())
    llm = start(*CAPABLE, "--limit", "max_compile_memory=20000000")
    reply = llm.side(**upload)
    assert reply["type"] == "error" and "20000000 bytes" in reply["error"], reply


def everything(llm: Llm) -> set[int]:
    return set(llm.descendants())


def test_a_killed_supervisor_leaves_nothing(start: Start) -> None:
    """The engine sees the end of its child. No process and no shared memory is left, with or without running guests."""
    llm = start(*CAPABLE)
    llm.start(llm.upload(guest2([NOOP, [LOOP]])), 1)
    llm.unlink()  # what our own engine does once the runtime has answered
    llm.send("main", b'{"op":"mid_process","freed":[],"ops":[{"id":1,"backtrack":0,"tokens":[]}]}')
    until(lambda: any(_cpu(pid) > 0.05 for pid in llm.workers()))
    pids = everything(llm)
    assert len(pids) == 3
    kill(llm.process.pid)
    llm.process.wait(PATIENCE)
    until(lambda: not everything(llm))
    assert llm.leftovers() == []
    with contextlib.suppress(RuntimeDied):  # the step that was under way may have got its answer still
        llm.main(op="ping")
    with pytest.raises(RuntimeDied):
        llm.main(op="ping")


def nursery_of(llm: Llm) -> int:
    """Return the id of the fork server, which is the parent of the workers."""
    (found,) = everything(llm) - {llm.process.pid} - set(llm.workers())
    return found


def test_a_killed_nursery_loses_its_modules_alone(start: Start) -> None:
    """Only the modules of the killed fork server are lost. The runtime continues with another fork server and its other
    processes."""
    llm = start(*CAPABLE)
    module = llm.upload(guest2([sample([65], VOCAB_SIZE)]))
    for round_number in range(2):
        first, second = 10 * round_number, 10 * round_number + 1
        llm.start(module, first)
        nursery, lost = nursery_of(llm), set(llm.workers())
        kill(nursery)
        until(lambda lost=lost: not lost & set(llm.descendants()))
        answer = llm.answer(llm.mid({"id": first, "tokens": [65]}), first)
        assert answer["error"].startswith("Worker:")
        assert llm.upload(guest2([[say(f"round {round_number}")], END]))  # a compiler is made as well
        assert llm.start(module, second)["error"] == ""
        assert nursery_of(llm) != nursery
        llm.mid(freed=(first, second))


@pytest.mark.few(1)
@pytest.mark.parametrize("who", ["worker", "nursery"])
def test_a_process_of_a_request_that_was_killed_is_let_go_once(start: Start, who: str) -> None:
    """A killed process leaves the list of processes. Freeing its sequence afterwards is not an error."""
    llm = start(*CAPABLE, "--isolation", "request")
    llm.start(llm.upload(guest2([sample([65], VOCAB_SIZE)])), 1)
    lost = set(llm.workers())
    kill(nursery_of(llm) if who == "nursery" else min(lost))
    until(lambda: not lost & set(llm.descendants()))
    until(lambda: llm.answer(llm.mid({"id": 1}), 1)["error"].startswith("Worker:"))
    llm.mid(freed=(1,))
    assert llm.start(llm.upload(guest2([NOOP])), 2)["error"] == ""


def test_a_nursery_that_dies_again_and_again_ends_the_runtime(start: Start) -> None:
    llm = start(*CAPABLE)
    llm.main(op="ping")
    for _ in range(4):
        until(lambda: len(everything(llm)) == 2 or llm.process_ended())
        if not llm.process_ended():
            nursery = nursery_of(llm)
            kill(nursery)
            until(lambda nursery=nursery: nursery not in everything(llm))
    assert llm.process.wait(PATIENCE) is not None
    until(lambda: not everything(llm))


def test_a_child_that_ends_at_once_can_be_watched() -> None:
    """A child that ended before the fork server watches it must not end the fork server."""
    program = (
        "import os, select, signal; from bridle.aici.runtime.parent_watch import fork_watched\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(300):\n"
        "    pid, handle = fork_watched()\n"
        "    if pid == 0: os._exit(0)\n"
        "    select.select([handle], [], []); os.close(handle)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE).returncode == 0


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_child_that_is_killed_before_it_is_watched_has_a_handle(thread: str) -> None:
    """The handle reports that the child has ended, accepts a signal, and leaves no zombie process."""
    program = (
        "import contextlib, os, select, signal, threading; from bridle.aici.runtime.parent_watch import fork_watched\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "watch = os.pidfd_open\n"
        "def late(pid):\n"
        "    os.pidfd_open = watch\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    with contextlib.suppress(ChildProcessError): os.waitpid(pid, 0)\n"
        "    return watch(pid)\n"
        "os.pidfd_open = late\n"
        "def main():\n"
        "    pid, handle = fork_watched()\n"
        "    if pid == 0: signal.pause()\n"
        "    assert select.select([handle], [], [])[0] == [handle]\n"
        "    with contextlib.suppress(ProcessLookupError): signal.pidfd_send_signal(handle, signal.SIGKILL)\n"
        "    try: os.waitpid(-1, 0)\n"
        "    except ChildProcessError: print('nothing is left')\n"
        f"if {thread == 'main'}: main()\n"
        "else: threading.Thread(target=main).start()\n"
    )
    told = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE, capture_output=True, text=True)
    assert told.stdout == "nothing is left\n", told


def test_a_runtime_ends_with_its_engine(start: Start, tokenizer: Path, store: Path) -> None:
    """If the engine, a child process of this test, is killed, the runtime ends and removes its shared memory."""
    program = (
        "import sys, pathlib; from tests.aici.llm_side import Llm\n"
        "llm = Llm(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
        "llm.main(op='ping'); print(llm.prefix, llm.process.pid, flush=True); sys.stdin.read()"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", program, str(tokenizer), str(store)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    prefix, pid = engine.stdout.readline().split()
    engine.kill()
    engine.wait()

    def is_gone() -> bool:
        try:
            return os.getpgid(int(pid)) != int(pid)
        except ProcessLookupError:
            return True

    until(is_gone)
    until(lambda: not [name for name in os.listdir("/dev/shm") if prefix[1:] in name])


def test_sigterm_to_the_group(start: Start) -> None:
    llm = start(*CAPABLE)
    llm.start(llm.upload(guest2([NOOP])), 1)
    os.killpg(llm.process.pid, signal.SIGTERM)
    assert llm.process.wait(PATIENCE) == 0
    until(lambda: not everything(llm))
