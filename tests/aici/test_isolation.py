"""Tests of the assignment of sequences to processes, and of sequence forks by a process fork."""

from __future__ import annotations

import json

import pytest

from tests.aici.conftest import CAPABLE, VOCAB_SIZE, Start
from tests.aici.guests import (
    END,
    LOOP,
    NOOP,
    SHOW_ARGUMENT,
    TRAP,
    by_branch,
    force,
    guest2,
    load,
    result,
    sample,
    say,
    splice,
    store,
)
from tests.aici.llm_side import Llm
from tests.waiting import until

TWO = [result({"branches": [splice([]), splice([])]})]


def fork(llm: Llm, parent: int, *children: int) -> dict[str, object]:
    ops = [{"id": parent}, *({"id": c, "clone_id": parent, "clone_idx": i} for i, c in enumerate(children, 1))]
    return llm.mid(*ops)


def test_tenants_never_share_a_process(start: Start) -> None:
    llm = start(*CAPABLE, "--limit", "max_workers=2", "--limit", "max_queue_time=100")
    module = llm.upload(guest2([NOOP]))
    llm.start(module, 1, user="eva")
    (eva,) = llm.workers()
    llm.start(module, 2, user="eva")
    assert llm.workers() == [eva]
    llm.start(module, 3, user="adam")
    assert len(llm.workers()) == 2
    _, reply = llm.instantiate(module, user="kain")
    assert reply["type"] == "error" and reply["is_user_error"] is True
    assert "all 2 workers are busy; waited 100 ms" in reply["error"]
    llm.mid(freed=(1, 2))  # eva's worker is warm now, and gives way
    assert llm.start(module, 4, user="kain")["error"] == ""
    until(lambda: eva not in llm.workers())
    assert llm.next(3)["error"] == ""


def test_a_tenant_waits_for_a_worker(start: Start) -> None:
    llm = start(*CAPABLE, "--limit", "max_workers=1", "--limit", "max_queue_time=20000")
    module = llm.upload(guest2([NOOP]))
    llm.start(module, 1, user="eva")
    rid = llm.begin_side(op="instantiate", req_id="r", prompt=[1], module_id=module, module_arg="", user="adam")
    llm.mid(freed=(1,))
    assert llm.end_side(rid)["type"] == "ok"


def test_instances_are_counted(start: Start) -> None:
    llm = start(*CAPABLE, "--limit", "max_instances_per_user=2", "--limit", "max_instances=3")
    module = llm.upload(guest2([NOOP]))
    for user in ("eva", "eva", "adam"):
        assert llm.instantiate(module, user=user)[1]["type"] == "ok"
    _, reply = llm.instantiate(module, user="eva")
    assert "3 of at most 3 instances, 2 of at most 2 of user 'eva'" in reply["error"]


def test_instances_that_nobody_claims_expire(start: Start) -> None:
    llm = start(*CAPABLE, "--limit", "max_unbound_time=1", "--limit", "max_instances=1")
    module = llm.upload(guest2([NOOP]))
    req_id, _ = llm.instantiate(module)
    until(lambda: llm.instantiate(module)[1]["type"] == "ok")
    assert "expired" in llm.answer(llm.mid({"id": 1, "req_id": req_id}), 1)["error"]


def test_a_request_id_is_used_once(start: Start) -> None:
    llm = start(*CAPABLE)
    module = llm.upload(guest2([NOOP]))
    request = {"op": "instantiate", "req_id": "same", "prompt": [1], "module_id": module, "module_arg": ""}
    assert llm.side(**request)["type"] == "ok"
    assert "in use already" in llm.side(**request)["error"]


def test_a_process_for_each_request(start: Start) -> None:
    """A trap, an endless loop or a dead worker of one request does not affect other requests."""
    llm = start(*CAPABLE, "--isolation", "request", "--wasm-max-step-time", "500")
    good = llm.upload(guest2([sample([65], VOCAB_SIZE)]))
    loop = llm.upload(guest2([NOOP, [LOOP]]))
    llm.start(good, 1)
    llm.start(loop, 2)
    assert len(llm.workers()) == 2
    data = llm.mid({"id": 1, "tokens": [65]}, {"id": 2})
    assert llm.answer(data, 1)["error"] == "" and llm.answer(data, 2)["logs"].startswith("\u23f3")
    llm.mid(freed=(2,))
    until(lambda: len(llm.workers()) == 1)
    llm.start(llm.upload(guest2([NOOP, TWO, [SHOW_ARGUMENT, by_branch(END, NOOP)]])), 5)
    llm.next(5)
    data = fork(llm, 5, 6)
    assert len(llm.workers()) == 2  # forks of a request share its process
    assert json.loads(llm.settle(data, 6)["logs"])["fork_group"] == [5, 6]
    llm.mid(freed=(5,))
    assert llm.next(6)["error"] == ""
    llm.mid(freed=(6, 1))
    until(lambda: not llm.workers())


def test_failed_instantiations_leave_no_process(start: Start) -> None:
    llm = start(*CAPABLE, "--isolation", "request")
    module = llm.upload(guest2([NOOP], create=[TRAP]))
    for _ in range(3):
        assert "unreachable" in llm.instantiate(module)[1]["data"]["error"]
    until(lambda: not llm.workers())


def test_forks_of_the_process_share_as_copies_do(start: Start) -> None:
    """Each sequence has its own process. Memory, globals and shared variables behave like with copied instances."""
    llm = start(*CAPABLE, "--fork-by", "process")
    steps = [
        [store("x", "61"), *NOOP],
        [result({"branches": [splice([]) for _ in range(3)]})],
        [SHOW_ARGUMENT, by_branch(force([1]), force([2]), force([3]))],
        [store("x", "62", "Append"), *NOOP],
        [load("x"), *NOOP],
    ]
    llm.start(llm.upload(guest2(steps)), 1)
    llm.next(1)
    data = fork(llm, 1, 2, 3)
    for seq in (1, 2, 3):
        answer = llm.settle(data, seq)
        assert answer["result"]["branches"][0]["splices"][0]["ff_tokens"] == [seq]
        assert json.loads(answer["logs"])["fork_group"] == [1, 2, 3]
    assert len(llm.descendants()) == 2 + 3
    versions = [llm.next(seq)["logs"] for seq in (1, 2, 3)]
    assert versions == [f'{{"WriteVar":{{"version":{v}}}}}' for v in (2, 3, 4)]
    assert llm.next(2)["logs"] == '{"ReadVar":{"version":4,"value":"61626262"}}'
    llm.mid(freed=(1,))  # the first process goes, its children stay
    until(lambda: len(llm.descendants()) == 2 + 2)
    assert llm.next(3)["error"] == "" and llm.next(2)["error"] == ""
    llm.mid(freed=(2, 3))
    until(lambda: len(llm.descendants()) == 2)


def test_forked_processes_end_with_the_runtime(start: Start) -> None:
    """A forked process ends with the runtime, even if its guest never stops and its parent is not the fork server."""
    llm = start(*CAPABLE, "--fork-by", "process", "--wasm-max-step-time", "500")
    llm.start(llm.upload(guest2([NOOP, TWO, [by_branch(NOOP, [LOOP])]])), 1)
    llm.next(1)
    fork(llm, 1, 2)
    llm.process.kill()
    llm.process.wait()
    until(lambda: not llm.descendants())


def test_a_deep_tree_of_processes(start: Start) -> None:
    llm = start(*CAPABLE, "--fork-by", "process")
    llm.start(llm.upload(guest2([NOOP, TWO, TWO, TWO, [say("leaf"), *NOOP]])), 1)
    llm.next(1)
    parent = 1
    for child in (2, 3, 4):
        data = fork(llm, parent, child)
        llm.settle(data, parent)
        assert llm.settle(data, child)["error"] == ""
        parent = child
    assert llm.next(4)["logs"] == "leaf"
    llm.mid(freed=(1, 2, 3, 4))
    until(lambda: len(llm.descendants()) == 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("isolation", ["tenant", "request"])
def test_a_guest_whose_tables_change_is_forked_by_process(start: Start, isolation: str) -> None:
    """A copied instance would lack changed tables, so the runtime detects the change and forks the process."""
    raw = """(table 2 2 funcref) (elem $e func $one) (type $t (func (result i32)))
      (func $one (result i32) (i32.const 1))
      (func $fill (table.init $e (i32.const 0) (i32.const 0) (i32.const 1)))"""
    call = "(call $putn (call_indirect (type $t) (i32.const 0))) (call $print_out)"
    llm = start(*CAPABLE, "--isolation", isolation)
    llm.start(llm.upload(guest2([["(call $fill)", *NOOP], TWO, [call, *NOOP]], raw=raw)), 1)
    llm.next(1)
    data = fork(llm, 1, 2)
    assert [llm.settle(data, seq)["logs"] for seq in (1, 2)] == ["1", "1"]
    assert len(llm.descendants()) == 2 + 2
