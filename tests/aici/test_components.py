"""Tests of controllers as Wasm components: a hand-written component runs in the whole runtime."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import wasmtime

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.controller_tools import ToolExecutor, function_tools
from bridle.outputs import Log
from tests.aici.conftest import CAPABLE, VOCAB_SIZE, Start
from tests.aici.guests import component, texts
from tests.aici.llm_side import Llm
from tests.aici.steering import Steered
from tests.waiting import PATIENCE, until

NOTHING = {"when_sampled": [], "backtrack": 0, "ff_tokens": []}
NOOP = {"branches": [{"splices": [NOTHING]}]}


def test_a_component_steers(llm2: Llm) -> None:
    masked = {"branches": [{"sample_mask": 1, "splices": []}]}
    forced = {"branches": [{"splices": [{"ff_tokens": [5, 6]}]}]}
    write = {"WriteVar": {"name": "x", "value": "61", "op": "Set", "when_version_is": None}}
    data, (mask, force, end, store, bits) = texts(masked, forced, {"branches": []}, write, "06" + "0" * 64)
    steps = [
        ["(call $log (local.get 0) (local.get 1))", f"(call $decide {force})"],
        [
            "(i32.store (i32.const 512) (i32.const 65)) (i32.store (i32.const 516) (i32.const 256))",
            f"(drop (call $allow (i32.const 512) (i32.const 2))) (call $decide {mask})",
        ],
        [
            f"(call $storage {store} (i32.const 40)) (call $log (i32.load (i32.const 40)) (i32.load (i32.const 44)))",
            f"(drop (call $allow-bits {bits})) (call $decide {mask})",
        ],
        [f"(call $decide {end})"],
    ]
    module = llm2.upload(component(steps, data=data))
    req_id, reply = llm2.instantiate(module, "the argument", prompt=[7, 8])
    assert reply["data"]["logs"] == "the argument" and reply["data"]["result"] == {"prompt": [7, 8]}
    answer = llm2.settle(llm2.mid({"id": 300, "req_id": req_id}), 300)
    assert json.loads(answer["logs"]) == {"backtrack": 0, "tokens": [], "sampled": None, "fork_group": [300]}
    assert answer["result"]["branches"][0]["splices"] == [{**NOTHING, "ff_tokens": [5, 6]}]
    step = llm2.mid({"id": 300, "tokens": [5, 6]})
    assert llm2.row(step, llm2.answer(step, 300)["result"]["branches"][0]["sample_mask"], VOCAB_SIZE) == [65, 256]
    step = llm2.mid({"id": 300, "tokens": [65], "sampled": 65})
    answer = llm2.answer(step, 300)
    assert answer["logs"] == '{"WriteVar":{"version":1}}' and answer["storage"] == [write]
    assert llm2.row(step, 0, VOCAB_SIZE) == [1, 2]
    assert llm2.next(300, (1,))["result"] == {"branches": []}
    llm2.mid(freed=(300,))


def test_a_component_forks_with_its_process(start: Start) -> None:
    llm = start(*CAPABLE)
    two = {"branches": [NOOP["branches"][0], NOOP["branches"][0]]}
    data, (noop, fork) = texts(NOOP, two)
    show = "(call $log (local.get 0) (local.get 1))"
    steps = [[f"(call $decide {fork})"], [show, f"(call $decide {noop})"], [show, f"(call $decide {noop})"]]
    llm.start(llm.upload(component(steps, data=data)), 1)
    step = llm.mid({"id": 1}, {"id": 2, "clone_id": 1, "clone_idx": 1})
    for seq in (1, 2):
        assert json.loads(llm.settle(step, seq)["logs"])["fork_group"] == [1, 2]
    assert len(llm.descendants()) == 2 + 2
    assert json.loads(llm.next(2, (9,))["logs"])["tokens"] == [9]
    llm.mid(freed=(1, 2))
    until(lambda: len(llm.descendants()) == 2)


def test_a_component_that_fails_ends_with_its_reason(start: Start) -> None:
    llm = start(*CAPABLE, "--wasm-max-step-time", "100", "--wasm-max-timeout-steps", "2", "--wasm-max-init-time", "100")
    wrong = {"branches": [{"splices": [{"ff_tokens": [VOCAB_SIZE]}]}]}
    data, (noop, bad, problem, gives_up) = texts(NOOP, wrong, "no such thing", {"error": "cannot go on"})
    cases = {
        "(unreachable)": "unreachable",
        "(i32.store (i32.const 512) (i32.const 999)) (drop (call $allow (i32.const 512) (i32.const 1)))": "token 999",
        f"(call $decide {bad})": "outside the vocabulary",
        f"(call $decide {gives_up})": "cannot go on",
        "(call $log (i32.const -8) (i32.const 64))": "wasm",
        "(loop $l (br $l))": "timeout",
    }
    for seq, (action, text) in enumerate(cases.items(), 1):
        llm.start(
            llm.upload(
                component(
                    [
                        [f"(call $decide {noop})"],
                        [action if "$decide" in action else f"{action} (call $decide {noop})"],
                    ],
                    data=data,
                )
            ),
            seq,
        )
        for _ in range(1000):  # a busy machine gives the guest little of its time in each
            answer = llm.answer(llm.mid({"id": seq}), seq)
            if answer["error"]:
                break
        assert text in answer["error"], (action, answer)
        llm.mid(freed=(seq,))
    refuse = f"""(i32.store8 (i32.const 32) (i32.const 1))
      (i32.store (i32.const 36) {problem.split(")")[0]})) (i32.store (i32.const 40) (i32.const 13))"""
    for create, text in ((refuse, "create: no such thing"), ("(loop $l (br $l))", "ms of CPU time")):
        _, reply = llm.instantiate(llm.upload(component([], create=create, data=data)), "arg")
        assert text in reply["data"]["error"] and reply["data"]["logs"] == "arg"
    until(lambda: not llm.workers())
    _, reply = llm.instantiate(llm.upload(bytes(wasmtime.wat2wasm("(component)"))))
    assert "does not export" in str(reply)


def test_a_component_calls_a_tool(tokenizer: Path, store: Path) -> None:
    """A component calls a tool through shared variables, like any guest: it writes the call, waits, and reads the
    result."""
    wanted = json.dumps({"name": "add", "arguments": {"a": 20, "b": 22}}).encode().hex()
    write = {"WriteVar": {"name": "tool:x", "value": wanted, "op": "Set", "when_version_is": None}}
    wait = {"branches": [{"splices": [NOTHING], "wait": True, "waits_for": [["tool:x:answer", 0]]}]}
    read = {"ReadVar": {"name": "tool:x:answer"}}
    data, (waits, end, writes, reads) = texts(wait, {"branches": []}, write, read)
    told = "(call $log (i32.load (i32.const 40)) (i32.load (i32.const 44)))"
    steps = [
        [f"(call $storage {writes} (i32.const 40)) (call $decide {waits})"],
        [f"(call $storage {reads} (i32.const 40)) {told} (call $decide {end})"],
    ]
    gate = threading.Event()
    desk = ToolExecutor(function_tools({"add": lambda a, b: gate.wait(PATIENCE) and a + b}))
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=("--store", str(store), *CAPABLE[-2:])), VOCAB_SIZE)
    pool.tools.desk = desk
    try:
        steered = Steered(pool)
        steered.add("a", component(steps, data=data))
        steered.run(until=lambda: desk.counts()["add"].num_running == 1)
        for _ in range(20):
            steered.step()
        assert not steered.is_over("a")
        gate.set()
        steered.run()
        assert b"42".hex() in "".join(event.text for event in steered.events["a"] if isinstance(event, Log))
        assert steered.tokens("a") == [] and desk.counts()["add"].num_calls == 1
    finally:
        gate.set()
        pool.shutdown()
        desk.close()
