"""Controllers as components: a hand-written one, through the whole runtime."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import wasmtime

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.controller_tools import ToolExecutor, function_tools
from bridle.outputs import Log
from tests.aici.conftest import CAPABLE, VOCAB_SIZE, Start
from tests.aici.llm_side import Llm
from tests.aici.steering import Steered
from tests.waiting import PATIENCE, until

_HOST = {
    "log": '(func (param "text" string))',
    "allow": '(func (param "tokens" (list u32)) (result u32))',
    "allow-bits": '(func (param "bits" string) (result u32))',
    "storage": '(func (param "command" string) (result string))',
    "vocab-size": "(func (result u32))",
    "sequence-id": "(func (result u64))",
    "has-capability": '(func (param "name" string) (result bool))',
    "constraint-new": '(func (param "kind" string) (param "spec" string) (result (result u32 (error string))))',
    "constraint-allow": '(func (param "handle" u32) (result u32))',
}
_CORE = {
    "log": "(param i32 i32)",
    "allow": "(param i32 i32) (result i32)",
    "allow-bits": "(param i32 i32) (result i32)",
    "storage": "(param i32 i32 i32)",
    "vocab-size": "(result i32)",
    "sequence-id": "(result i64)",
    "has-capability": "(param i32 i32) (result i32)",
    "constraint-new": "(param i32 i32 i32 i32 i32)",
    "constraint-allow": "(param i32) (result i32)",
}


def component(
    steps: list[list[str]], create: str = "(i32.store8 (i32.const 32) (i32.const 0))", data: str = ""
) -> bytes:
    """A controller whose n-th call of `next` does the n-th step; each step leaves its decision by `$decide`."""
    exports = "".join(f'(export "{name}" {kind})' for name, kind in _HOST.items())
    lowered = "".join(
        f'(core func ${name} (canon lower (func $host "{name}") (memory (core memory $libc "memory"))'
        f' (realloc (core func $libc "realloc"))))'
        for name in _HOST
    )
    imports = "".join(f'(import "host" "{name}" (func ${name} {kind}))' for name, kind in _CORE.items())
    given = "".join(f'(export "{name}" (func ${name}))' for name in _HOST)
    body = "".join(
        f"(if (i32.eq (global.get $at) (i32.const {i})) (then (global.set $at (i32.const {i + 1}))"
        f" {' '.join(step)} (return (i32.const 48))))"
        for i, step in enumerate(steps)
    )
    lift = '(memory (core memory $libc "memory")) (realloc (core func $libc "realloc"))'
    text = f"""(component
      (import "bridle:controller/host@0.1.0" (instance $host {exports}))
      (core module $libcode (memory (export "memory") 4) (global $heap (mut i32) (i32.const 65536))
        (func (export "realloc") (param i32 i32 i32 i32) (result i32)
          (global.set $heap (i32.and (i32.add (global.get $heap) (i32.const 7)) (i32.const -8)))
          (global.get $heap)
          (global.set $heap (i32.add (global.get $heap) (local.get 3)))))
      (core instance $libc (instantiate $libcode))
      {lowered}
      (core module $code (import "libc" "memory" (memory 1)) {imports}
        (global $at (mut i32) (i32.const 0))
        (func $decide (param $p i32) (param $n i32)
          (i32.store (i32.const 48) (local.get $p)) (i32.store (i32.const 52) (local.get $n)))
        (func (export "create") (param i32 i32) (result i32)
          (call $log (local.get 0) (local.get 1)) {create} (i32.const 32))
        (func (export "start") (param i32 i32) (result i32) (call $decide (local.get 0) (local.get 1)) (i32.const 48))
        (func (export "next") (param i32 i32) (result i32) {body} (unreachable))
        {data})
      (core instance $it (instantiate $code (with "libc" (instance $libc)) (with "host" (instance {given}))))
      (func (export "create") (param "argument" string) (result (result (error string)))
        (canon lift (core func $it "create") {lift}))
      (func (export "start") (param "prompt" string) (result string) (canon lift (core func $it "start") {lift}))
      (func (export "next") (param "step" string) (result string) (canon lift (core func $it "next") {lift})))"""
    return bytes(wasmtime.wat2wasm(text))


def texts(*pieces: Any) -> tuple[str, list[str]]:
    """A data segment, and for each piece the two numbers that point at it."""
    data, numbers, place = "", [], 1024
    for piece in pieces:
        raw = (piece if isinstance(piece, str) else json.dumps(piece)).encode()
        data += f'(data (i32.const {place}) "{"".join(f"{chr(92)}{b:02x}" for b in raw)}")'
        numbers.append(f"(i32.const {place}) (i32.const {len(raw)})")
        place += len(raw) + 8
    return data, numbers


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


def test_faults_of_components(start: Start) -> None:
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
    """Over the variables that any guest has: it writes the call, is not asked while it waits, and reads the answer."""
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
