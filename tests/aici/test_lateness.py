"""Tests of late guests: lateness is measured by the clock, and a timeout by the guest's own processor time. A guest
without processor time only waits. A guest that uses its time fails after a number of step limits, in both dialects."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.aici.conftest import CAPABLE, VOCAB_SIZE, Start
from tests.aici.guests import END, LOOP, guest1, guest2, mask, result, sample
from tests.aici.llm_side import Llm
from tests.waiting import until

#: Step limits that pass by the clock, more than a guest may be late.
MANY = 50
HURRIED = ("--cap-fork", "--cap-backtrack", "--cap-ff-tokens", "--wasm-max-step-time", "5")


@pytest.fixture
def stopped(start: Start) -> tuple[Llm, int]:
    """Return a runtime with a sequence that was called while its worker was stopped, and the worker's id."""
    llm = start(*HURRIED)
    assert begun(llm, llm.upload(guest2([sample([65], VOCAB_SIZE), sample([66], VOCAB_SIZE)])), 1)["error"] == ""
    (worker,) = llm.workers()
    stop(worker)
    assert is_waiting(llm.answer(llm.mid({"id": 1, "tokens": [65], "sampled": 65}), 1))
    return llm, worker


def begun(llm: Llm, module: str, seq: int) -> dict[str, Any]:
    """Instantiate a controller and repeat the first step until it is answered, because this answer may be late."""
    answer = llm.start(module, seq)
    while is_waiting(answer):
        answer = llm.answer(llm.mid({"id": seq}), seq)
    return answer


def stop(pid: int) -> None:
    """Stop a process with a signal. Its threads continue until one of them has taken the signal."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: {state_of(task) for task in Path(f"/proc/{pid}/task").iterdir()} == {"T"}, "that all threads stop")


def state_of(task: Path) -> str:
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]


def is_waiting(answer: dict[str, Any]) -> bool:
    return answer["error"] == "" and answer["result"]["branches"][0].get("wait") is True


def test_a_guest_without_processor_time_is_waited_for(stopped: tuple[Llm, int]) -> None:
    llm, worker = stopped
    told = ""
    for _ in range(MANY):
        answer = llm.answer(llm.mid({"id": 1}), 1)
        assert is_waiting(answer)
        told += answer["logs"]
    assert told.count("\n") == 9 and "step 10/10" in told  # of the first step one line more; then there is no news
    os.kill(worker, signal.SIGCONT)
    answer = llm.answer(llm.mid({"id": 1}), 1)
    while is_waiting(answer):
        answer = llm.answer(llm.mid({"id": 1}), 1)
    assert answer["result"]["branches"][0]["sample_mask"] is not None
    llm.mid(freed=(1,))


def test_a_worker_that_stands_still_for_good_is_lost(start: Start) -> None:
    llm = start(*HURRIED, "--limit", "max_standstill=500")
    module = llm.upload(guest2([sample([65], VOCAB_SIZE)]))
    seq = 1
    while begun(llm, module, seq)["error"]:  # lost already: on a busy machine it stands still by itself
        seq += 1
    for worker in llm.workers():
        stop(worker)
    answer = llm.answer(llm.mid({"id": seq, "tokens": [65], "sampled": 65}), seq)
    while is_waiting(answer):
        answer = llm.answer(llm.mid({"id": seq}), seq)
    assert answer["error"].startswith("Worker: the process died"), answer
    llm.mid(freed=(seq,))


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["pre", "mid", "post"])
def test_an_old_guest_that_loops_is_told_after_its_step_limits(start: Start, where: str) -> None:
    """A looping D1 guest fails after its step limits under a D1 engine, long before the limit of one callback."""
    llm = start("--wasm-max-step-time", "20", "--limit", "max_call_time=60000")
    go = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
    steps = {"pre": go, "mid": sample_old(65), "post": [result({"stop": False})]}
    phases = {name: [LOOP] if name == where else step for name, step in steps.items()}
    module = llm.upload(guest1([phases["pre"]], [phases["mid"]], [phases["post"]]))
    req_id, _ = llm.instantiate(module)
    assert "steps in a row (the limit)" in error_of_dialect1(llm, req_id)
    llm.main(op="post_pre_process", pre_ops=[], post_ops=[], freed=[1])


def sample_old(token: int) -> list[str]:
    return [mask([token], VOCAB_SIZE, new=False), result({"SampleWithBias": {}})]


def error_of_dialect1(llm: Llm, req_id: str) -> str:
    """Run steps of a sequence like an engine until it fails, and return the error."""
    pre_ops, post_ops = [{"id": 1, "req_id": req_id}], []
    while True:
        reply = llm.main(op="post_pre_process", pre_ops=pre_ops, post_ops=post_ops, freed=[])
        assert reply["type"] == "ok", reply
        pre_ops, post_ops = [], []
        pre = reply["data"]["pre_seqs"]["1"]
        error: str = pre["error"] or reply["data"]["post_seqs"].get("1", {}).get("error", "")
        if error:
            return error
        if pre["result"]["suspend"]:
            continue
        reply = llm.main(op="mid_process", ops=[{"id": 1}])
        mid = reply["data"]["seqs"]["1"]
        if mid["error"]:
            return str(mid["error"])
        if mid["result"] is None:
            post_ops = [{"id": 1, "tokens": [65], "backtrack": 0}]
        else:  # late: nothing happened
            post_ops = [{"id": 1, "tokens": [], "backtrack": 1}]


def test_an_old_guest_that_loops_under_a_new_engine(start: Start) -> None:
    llm = start(*CAPABLE[:3], "--wasm-max-step-time", "20", "--limit", "max_call_time=60000")
    go = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
    req_id, _ = llm.instantiate(llm.upload(guest1([go], [[LOOP]], [END])))
    answer = llm.answer(llm.mid({"id": 1, "req_id": req_id}), 1)
    while is_waiting(answer):
        answer = llm.answer(llm.mid({"id": 1}), 1)
    assert "10 steps in a row (the limit)" in answer["error"] and "wasm backtrace" in answer["error"]
    llm.mid(freed=(1,))
