"""Tests of hostile controllers, in every callback: only their own request ends, with an error that names the limit.

A sequence of the same tenant runs in the same worker all the time, and must answer every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aici.conftest import CAPABLE, VOCAB_SIZE
from tests.aici.guests import (
    BAD_BLOB,
    BAD_READ_POINTER,
    BAD_RESULT_POINTER,
    BAD_VECTOR_POINTER,
    DEEP,
    EAT_MEMORY,
    END,
    EXIT,
    HOST_FLOOD,
    LOG_FLOOD,
    LOOP,
    NOOP,
    STOP,
    TRAP,
    force,
    guest1,
    guest2,
    mask,
    result,
    sample,
    say,
    splice,
    store,
)
from tests.aici.llm_side import Llm

NEIGHBOUR = 1
LIMITS = (
    "--wasm-max-step-time=20",
    "--wasm-max-timeout-steps=20",
    "--wasm-max-init-time=150",
    "--wasm-max-memory=4",
    "--limit=max_result=100000",
    "--limit=max_masks=5",
    "--limit=max_storage_commands=5",
    "--limit=max_variable_bytes=1000",
    "--limit=max_variables=3",
    "--limit=max_rewound_tokens=50",
    "--limit=max_waits=8",
    "--limit=max_forced_tokens=1000",
)


@pytest.fixture(scope="module")
def llm(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[Llm]:
    made = Llm(tokenizer, store, *CAPABLE, *LIMITS, "--limit=max_workers=1")
    yield made
    made.close()


class Neighbour:
    """A well-behaved sequence of the same tenant. On a busy machine this sequence may be late, but never lost."""

    def __init__(self, llm: Llm) -> None:
        self.llm = llm
        self.is_late = False

    def op(self) -> dict[str, Any]:
        return {"id": NEIGHBOUR} if self.is_late else {"id": NEIGHBOUR, "tokens": [65], "sampled": 65}

    def check(self, data: dict[str, Any]) -> None:
        answer = self.llm.answer(data, NEIGHBOUR)
        assert answer["error"] == "", answer
        self.is_late = answer["logs"].startswith("\u23f3")
        assert self.is_late or answer["result"]["branches"][0]["sample_mask"] is not None

    def settle(self) -> None:
        for _ in range(100):
            self.check(self.llm.mid(self.op()))
            if not self.is_late:
                return
        raise AssertionError("the neighbour is always late")


@pytest.fixture(autouse=True)
def neighbour(llm: Llm) -> Iterator[Neighbour]:
    """Yield a neighbour, and check that it and its worker survive the test."""
    llm.start(llm.upload(guest2([sample([65], VOCAB_SIZE)])), NEIGHBOUR)
    workers = set(llm.workers())
    beside = Neighbour(llm)
    yield beside
    beside.settle()
    assert workers & set(llm.workers()), "the worker was lost"  # a compiler may be on its way out, or in
    llm.mid(freed=(NEIGHBOUR, 2))


def run_until_error(llm: Llm, beside: Neighbour, seq: int, limit: int = 1000) -> dict[str, Any]:
    """Run steps of a sequence and its neighbour until the sequence fails. The neighbour must answer in every step."""
    logs = ""
    for _ in range(limit):
        data = llm.mid({"id": seq}, beside.op())
        answer = llm.answer(data, seq)
        logs += answer["logs"]
        beside.check(data)
        if answer["error"]:
            return {**answer, "all_logs": logs}
    raise AssertionError("it never failed")


def in_callback(where: str, *actions: str) -> bytes:
    if where == "create":
        return guest2([NOOP], create=actions)
    if where == "init_prompt":
        return guest2([NOOP], init=actions)
    return guest2([NOOP, [say("alive\n"), *actions, *NOOP]])


def provoke(llm: Llm, neighbour: Neighbour, where: str, *actions: str) -> dict[str, Any]:
    """Run a hostile controller, and return the answer that contains the error."""
    module = llm.upload(in_callback(where, say("so far\n"), *actions))
    if where == "mid":
        first = llm.start(module, 2)
        assert first["error"] == "", first
        answer = run_until_error(llm, neighbour, 2)
        assert "alive\nso far\n" in answer["all_logs"]
        assert "Previous WASM Error" in llm.answer(llm.mid({"id": 2}), 2)["error"]
    else:
        _, reply = llm.instantiate(module)
        assert reply["type"] == "ok", reply
        assert "data" in reply, reply
        answer = reply["data"]
        assert answer["result"] is None and answer["logs"].startswith("so far\n")
    llm.mid(freed=(2,))
    return answer


CASES = {
    "trap": (TRAP, "unreachable"),
    "exit": (EXIT, "proc_exit: 3"),
    "stop": (STOP, r"*** aici_host_stop()"),
    "deep recursion": (DEEP, "call stack exhausted"),
    "memory bomb": (EAT_MEMORY, "of at most 4194304 bytes"),
    "result pointer": (BAD_RESULT_POINTER, "pointer 0xfffffff0 with 256 bytes is outside the memory"),
    "read pointer": (BAD_READ_POINTER, "is outside the memory"),
    "vector pointer": (BAD_VECTOR_POINTER, "is outside the memory"),
    "unknown blob": (BAD_BLOB, "unknown blob 77"),
    "tokenize too much": (
        "(drop (call $tokenize (i32.const 0) (i32.const 0x7fffffff)))",
        "and 1048576 in one call",
    ),
    "result too large": ("(call $return (i32.const 0) (i32.const 100001))", "at most 100000"),
    "bad storage": ("(drop (call $storage (i32.const 0) (i32.const 4)))", "malformed storage command"),
    "storage flood": (store("a", "00") * 6, "more than 5 storage commands"),
    "variable too large": (store("a", "00" * 1001), "bytes; at most 1000"),
    "too many variables": ("".join(store(n, "00") for n in "abcd"), "more than 3 variables"),
    "long variable name": (store("n" * 300, "00"), "at most 256"),
    "odd hex": (store("a", "0"), "not hexadecimal"),
    "mask flood": (mask([1], VOCAB_SIZE) * 6, "more than 5 masks"),
    "mask pointer": ("(drop (call $bias (i32.const 0xfffffffc)))", "is outside the memory"),
}


@pytest.mark.few(20)
@pytest.mark.parametrize("where", ["create", "init_prompt", "mid"])
@pytest.mark.parametrize("name", CASES)
def test_a_fault_ends_its_own_request(llm: Llm, neighbour: Neighbour, where: str, name: str) -> None:
    action, text = CASES[name]
    answer = provoke(llm, neighbour, where, action)
    assert text in answer["error"], answer
    assert "wasm backtrace" in answer["error"]
    assert "memory: " in answer["error"]


@pytest.mark.few(3)
@pytest.mark.parametrize("where", ["create", "init_prompt", "mid"])
@pytest.mark.parametrize("name", ["loop", "host-call flood", "log flood"])
def test_what_never_ends_is_ended(llm: Llm, neighbour: Neighbour, where: str, name: str) -> None:
    action = {"loop": LOOP, "host-call flood": HOST_FLOOD, "log flood": LOG_FLOOD}[name]
    module = llm.upload(in_callback(where, action))
    if where == "mid":
        llm.start(module, 2)
        answer = run_until_error(llm, neighbour, 2)
        assert "timeout" in answer["error"] and "20 steps in a row" in answer["error"]
        assert "\u23f3 late: 20 ms, step 1/20" in answer["all_logs"]
        llm.mid(freed=(2,))
    else:
        _, reply = llm.instantiate(module)
        assert "data" in reply, reply
        answer = reply["data"]
        assert "ms of CPU time" in answer["error"]
    assert len(answer["logs"]) <= 64 << 10
    assert "wasm backtrace" in answer["error"]


RESULTS = {
    "out of the vocabulary": (splice([VOCAB_SIZE]), f"token {VOCAB_SIZE} in ff_tokens is outside the vocabulary"),
    "negative token": (splice([-1]), "malformed result"),
    "beyond the start": (splice([], backtrack=2), "backtrack of 2 tokens, but the sequence has only 1"),
    "negative backtrack": ({"sample_mask": None, "splices": [{"backtrack": -1}]}, "malformed result"),
    "huge backtrack": ({"sample_mask": None, "splices": [{"backtrack": 1 << 40}]}, "malformed result"),
    "many forced tokens": (splice([1] * 1001), "1001 forced tokens exceed the limit of 1000"),
    "unknown mask": ({"sample_mask": 1, "splices": []}, "was not created in this callback"),
    "mask offset": ({"sample_mask": 2096, "splices": []}, "was not created in this callback"),
    "NaN": ('{"branches":[{"sample_mask":null,"temperature":NaN,"splices":[{}]}]}', "malformed result"),
    "infinite temperature": ({**splice([]), "temperature": 1e999}, "malformed result"),
    "negative temperature": ({**splice([]), "temperature": -1.0}, "temperature is -1.0"),
    "unknown bias token": ({**splice([]), "bias": [[VOCAB_SIZE, 1.0]]}, "outside the vocabulary"),
    "no splice": ({"sample_mask": None, "splices": []}, "exactly one splice"),
    "two splices": ({"sample_mask": None, "splices": [{}, {}]}, "exactly one splice"),
    "condition without a sample": ({"sample_mask": None, "splices": [{"when_sampled": [1]}]}, "exactly one splice"),
    "no JSON": ("{", "malformed result"),
    "not UTF-8": ('"\u00ff', "malformed result"),
    "another shape": ("[]", "malformed result"),
    "too many candidates": ({**splice([]), "top_logprobs": 101}, "limit of 100"),
    "too many vectors": ({**splice([]), "control_vectors": {f"v{n}": 1.0 for n in range(9)}}, "at most 8"),
    "a scale that is too large": ({**splice([]), "control_vectors": {"v": 1e9}}, "at most 1000"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_not_trusted(llm: Llm, name: str) -> None:
    value, text = RESULTS[name]
    step = [result(value if isinstance(value, str) else {"branches": [value]})]
    answer = llm.start(llm.upload(guest2([step])), 2)
    assert text in answer["error"], answer
    assert answer["result"] is None
    llm.mid(freed=(2,))


def test_too_many_forced_tokens_for_a_result_to_be_short(llm: Llm) -> None:
    """A loop in the guest writes tens of thousands of tokens."""
    head, tail = '{"branches":[{"splices":[{"ff_tokens":[', "1]}]}]}"
    loop = f"""
      (call $puts (i32.const 600) (i32.const {len(head)}))
      (loop $again
        (call $putc (i32.const 49)) (call $putc (i32.const 44))
        (br_if $again (i32.lt_u (global.get $length) (i32.const 90000))))
      (call $puts (i32.const 650) (i32.const {len(tail)}))
      (call $return (i32.const 0x8000) (global.get $length)) (global.set $length (i32.const 0))"""
    quoted = head.replace('"', "\\22")
    data = f'(data (i32.const 600) "{quoted}") (data (i32.const 650) "{tail}")'
    answer = llm.start(llm.upload(guest2([[loop]], raw=data)), 2)
    assert "forced tokens exceed the limit of 1000" in answer["error"], answer


def test_a_guest_without_a_result_is_told_so(llm: Llm) -> None:
    answer = llm.start(llm.upload(guest2([[say("hm")]])), 2)
    assert "did not call aici_host_return_process_result" in answer["error"] and answer["logs"] == "hm"
    llm.mid(freed=(2,))


def test_endless_waiting_ends(llm: Llm, neighbour: Neighbour) -> None:
    llm.start(llm.upload(guest2([NOOP])), 2)
    answer = run_until_error(llm, neighbour, 2)
    assert "waited for more than 8 steps in a row" in answer["error"]
    llm.mid(freed=(2,))


def test_endless_rewinding_ends(llm: Llm) -> None:
    llm.start(
        llm.upload(guest2([force([1] * 20), force([], backtrack=20)] * 3)),
        2,
    )
    error = ""
    for op in [{"tokens": [1] * 20}, {"backtrack": 20}] * 4:
        answer = llm.answer(llm.mid({"id": 2, **op}), 2)
        error = error or answer["error"]
    assert "60 tokens rolled back exceed the limit of 50" in error
    llm.mid(freed=(2,))


def test_a_fork_bomb_hits_its_limit_and_hurts_nobody(llm: Llm, neighbour: Neighbour) -> None:
    """Every sequence forks whenever it can. The request reaches its limit, and the neighbour continues."""
    two = [result({"branches": [splice([]), splice([])]})]
    llm.start(llm.upload(guest2([NOOP, two])), 2)
    alive, following, errors = [2], 100, []
    llm.next(2)
    for _ in range(6):
        ops: list[dict[str, Any]] = [{"id": seq} for seq in alive]
        for seq in alive:
            ops.append({"id": following, "clone_id": seq, "clone_idx": 1})
            following += 1
        data = llm.mid(*ops, neighbour.op())
        neighbour.check(data)
        answers = {op["id"]: llm.settle(data, op["id"]) for op in ops}
        errors += [answer["error"] for answer in answers.values() if answer["error"]]
        alive = [seq for seq, answer in answers.items() if not answer["error"]]
        assert len(alive) <= 16
        if not alive:
            break
    assert errors and all("limit of 16 forks" in error for error in errors)
    llm.mid(freed=(2, *range(100, following)))


def test_a_guest_that_is_late_but_not_lost(llm: Llm, neighbour: Neighbour) -> None:
    """The guest works for longer than a step. Meanwhile its answer is a no-op, and its real answer is not lost."""
    work = """(i32.store (i32.const 700) (i32.const 0))
      (loop $work (i32.store (i32.const 700) (i32.add (i32.load (i32.const 700)) (i32.const 1)))
        (br_if $work (i32.lt_u (i32.load (i32.const 700)) (i32.const 5000000))))"""
    module = llm.upload(guest2([NOOP, [work, say("done\n"), *sample([66], VOCAB_SIZE)]]))
    llm.start(module, 2)
    late = 0
    while True:
        data = llm.mid({"id": 2}, neighbour.op())
        answer = llm.answer(data, 2)
        neighbour.check(data)
        if answer["logs"] == "done\n":
            break
        late += 1
        assert answer["error"] == "" and answer["logs"].startswith("\u23f3"), answer
        assert answer["result"]["branches"][0]["splices"] == [{"when_sampled": [], "backtrack": 0, "ff_tokens": []}]
    assert llm.row(data, answer["result"]["branches"][0]["sample_mask"], VOCAB_SIZE) == [66]
    assert late <= 20
    llm.mid(freed=(2,))


def test_freeing_what_still_runs(llm: Llm) -> None:
    llm.start(llm.upload(guest2([NOOP, [LOOP]])), 2)
    llm.mid({"id": 2})
    llm.mid(freed=(2,))
    llm.start(llm.upload(guest2([sample([66], VOCAB_SIZE)])), 2)
    assert llm.next(2)["error"] == ""
    llm.mid(freed=(2,))


def test_old_guests_are_ended_as_well(llm: Llm, neighbour: Neighbour) -> None:
    go = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
    for pre, mid, post in (([LOOP], END, END), (go, [LOOP], END)):
        req_id, _ = llm.instantiate(llm.upload(guest1([pre], [mid], [post])))
        llm.mid({"id": 2, "req_id": req_id})
        assert "timeout" in run_until_error(llm, neighbour, 2)["error"]
        llm.mid(freed=(2,))
    bad = [result({"suspend": True, "num_forks": 1, "ff_tokens": [1]})]
    answer = llm.start(llm.upload(guest1([bad], [END], [END])), 2)
    assert "must ask for one fork" in answer["error"]
    llm.mid(freed=(2,))


def test_modules_that_are_no_controllers(llm: Llm) -> None:
    import base64

    import wasmtime

    for wasm in (b"", b"\0asm", b"junk" * 100, b"\0asm\x01\0\0\0\x0a\xff\xff\xff\xff\x0f", bytes(1 << 16)):
        reply = llm.side(op="mk_module", binary=base64.b64encode(wasm).decode())
        assert reply["type"] == "error" and reply["is_user_error"] is True, wasm[:20]
    assert llm.side(op="mk_module", binary="!!!")["type"] == "error"
    empty = llm.upload(bytes(wasmtime.wat2wasm("(module)")))
    _, reply = llm.instantiate(empty)
    assert reply["type"] == "error" and "does not export" in reply["error"]
    foreign = guest2([END]).replace(b"aici_host_stop", b"aici_host_stoq")
    _, reply = llm.instantiate(llm.upload(foreign))
    assert reply["type"] == "error" and "aici_host_stoq" in reply["error"]
    huge = wasmtime.wat2wasm(
        '(module (memory (export "memory") 1000) (func (export "aici_init")) (func (export "aici_create")'
        ' (result i32) (i32.const 0)) (func (export "aici_init_prompt") (param i32))'
        ' (func (export "aici_mid_process") (param i32)))'
    )
    _, reply = llm.instantiate(llm.upload(bytes(huge)))
    assert "memory is limited to 4194304 bytes" in str(reply), reply
