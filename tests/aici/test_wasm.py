"""Tests of guests in this process: calls between host and guest, copies, code rewriting, memory and constraints."""

from __future__ import annotations

import importlib
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st

from bridle.aici.replies import ReadVar, WriteVar
from bridle.aici.runtime import module_metadata, wasm_calls
from bridle.aici.runtime.compiler import compile_module
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.loaded_module import GuestEnvironment, LoadedModule
from bridle.aici.runtime.logs import LogBuffer
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.module_metadata import settings_key
from bridle.aici.runtime.storage import SharedVariables
from bridle.aici.runtime.wasm import GuestFault, GuestStopped, Ticker
from bridle.aici.runtime.wasm_binary import expose_state, is_component
from bridle.aici.runtime.wasm_calls import GuestMemory
from bridle.errors import ControllerError, ControllerTimeout, ControllerTrap, InvalidRequest
from tests.aici.guests import (
    BAD_RESULT_POINTER,
    BAD_VECTOR_POINTER,
    DEEP,
    END,
    EXIT,
    HOST_FLOOD,
    LOOP,
    NOOP,
    TRAP,
    guest2,
    result,
    sample,
    say,
)
from tests.aici.instances import VOCABULARY, load
from tests.sources import ROOT


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox(DEFAULT_LIMITS)


def mid(instance: Instance, budget_ms: float = 5000) -> Any:
    return msgspec.json.decode(instance.callback("aici_mid_process", b'{"fork_group":[1]}', budget_ms))


@pytest.fixture
def ticking(sandbox: Sandbox) -> Iterator[None]:
    ticker = Ticker(sandbox.engine, lambda: None)
    ticker.start()
    ticker.awake()
    yield
    ticker.stop()


def test_masks_and_the_log_come_back_from_a_call(sandbox: Sandbox, tmp_path: Path) -> None:
    instance = load(sandbox, guest2([[say("hi"), *sample([3, 256], 257)]]), tmp_path)
    assert instance.handle == 7
    answer = mid(instance)
    assert instance.log.drain() == "hi"
    bits = instance.masks[answer["branches"][0]["sample_mask"] - 1]
    assert [i for i in range(8 * len(bits)) if bits[i >> 3] >> (i & 7) & 1] == [3, 256]


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (TRAP, ControllerTrap, "unreachable"),
        (EXIT, ControllerTrap, "proc_exit: 3"),
        (DEEP, ControllerTrap, "call stack exhausted"),
        (BAD_RESULT_POINTER, GuestFault, "0xfffffff0"),
        (BAD_VECTOR_POINTER, GuestFault, "0x7fffffff"),
    ],
)
def test_a_fault_ends_the_guest_with_its_reason(
    sandbox: Sandbox, tmp_path: Path, action: str, kind: type[Exception], text: str
) -> None:
    instance = load(sandbox, guest2([[action]]), tmp_path)
    with pytest.raises(kind, match=text):
        mid(instance)
    with pytest.raises(ControllerTrap, match="Previous WASM Error"):
        mid(instance)


@pytest.mark.parametrize("action", [LOOP, HOST_FLOOD])
@pytest.mark.usefixtures("ticking")
def test_endless_guests_are_interrupted(sandbox: Sandbox, tmp_path: Path, action: str) -> None:
    limits = replace(DEFAULT_LIMITS, max_call_time=60)
    instance = load(sandbox, guest2([[action]]), tmp_path, limits)
    with pytest.raises(ControllerTimeout, match="60 ms"):
        mid(instance, 60)


@pytest.mark.usefixtures("ticking")
def test_a_guest_is_cancelled_from_another_thread(sandbox: Sandbox, tmp_path: Path) -> None:
    instance = load(sandbox, guest2([[say("x"), LOOP]]), tmp_path)
    ticker = Ticker(sandbox.engine, lambda: instance.cancel(GuestStopped("enough")))
    ticker.start()
    ticker.awake()
    with pytest.raises(GuestStopped, match="enough"):
        mid(instance)
    ticker.stop()


def test_exceptions_surface_in_their_own_thread(sandbox: Sandbox, tmp_path: Path) -> None:
    """The guests of two threads fail in different ways many times. No thread gets the other thread's error."""
    programs = {}
    for name, action in (("proc_exit: 3", EXIT), ("0xfffffff0", BAD_RESULT_POINTER)):
        programs[name] = load(sandbox, guest2([[action]]), tmp_path).program
    wrong: list[str] = []

    def fail_often(text: str, program: LoadedModule) -> None:
        for _ in range(150):
            instance = Instance(
                program, GuestEnvironment(VOCABULARY, DEFAULT_LIMITS), b"", SharedVariables(DEFAULT_LIMITS)
            )
            try:
                mid(instance)
            except ControllerError as error:
                if text not in str(error):
                    wrong.append(str(error))

    threads = [threading.Thread(target=fail_often, args=item) for item in programs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


COUNTING = """
 (global $count (mut i64) (i64.const 5)) (global $ratio (mut f64) (f64.const 0.5))
 (func (export "count") (param i32) (result i32)
   (global.set $count (i64.add (global.get $count) (i64.const 1)))
   (global.set $ratio (f64.mul (global.get $ratio) (f64.const 2)))
   (i32.store (i32.const 900) (i32.add (i32.load (i32.const 900)) (i32.const 1)))
   (i32.add (i32.trunc_f64_u (global.get $ratio))
     (i32.add (i32.wrap_i64 (global.get $count)) (i32.load (i32.const 900)))))
 (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
"""


def test_a_copy_goes_its_own_way(sandbox: Sandbox, tmp_path: Path) -> None:
    instance = load(sandbox, guest2([NOOP], raw=COUNTING), tmp_path)
    assert instance.run_guest("count", (0,), 100) == 1 + 6 + 1
    assert instance.run_guest("grow", (20,), 100) == 16
    copy = instance.fork()
    assert copy.memory.size == instance.memory.size == 36 << 16
    assert [copy.run_guest("count", (0,), 100) for _ in range(2)] == [2 + 7 + 2, 4 + 8 + 3]
    assert instance.run_guest("count", (0,), 100) == 2 + 7 + 2
    copy.close()
    assert instance.run_guest("count", (0,), 100) == 4 + 8 + 3


def test_a_start_function_runs_once(sandbox: Sandbox, tmp_path: Path) -> None:
    raw = """(func $begin (i32.store (i32.const 900) (i32.add (i32.load (i32.const 900)) (i32.const 1)))) (start $begin)
      (func (export "times") (param i32) (result i32) (i32.load (i32.const 900)))"""
    instance = load(sandbox, guest2([NOOP], raw=raw), tmp_path)
    assert instance.run_guest("times", (0,), 100) == 1
    assert instance.fork().run_guest("times", (0,), 100) == 1


def test_memory_is_limited(sandbox: Sandbox, tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, max_memory=20 << 16)
    instance = load(sandbox, guest2([NOOP], raw=COUNTING), tmp_path, limits)
    assert instance.run_guest("grow", (5,), 100) == 0xFFFFFFFF
    assert instance.run_guest("grow", (4,), 100) == 16


@pytest.fixture(scope="module")
def memory() -> Iterator[GuestMemory]:
    engine = wasmtime.Engine()
    store = wasmtime.Store(engine)
    yield GuestMemory(store, wasmtime.Memory(store, wasmtime.MemoryType(wasmtime.Limits(1, 2))))
    store.close()  # it has to live as long as its memory


@given(start=st.integers(0, 2**32 - 1), length=st.integers(0, 2**32 - 1))
def test_every_pointer_is_checked(memory: GuestMemory, start: int, length: int) -> None:
    if start + length <= memory.size:
        assert len(memory.read(start, length)) == length
    else:
        with pytest.raises(GuestFault, match="outside the memory"):
            memory.read(start, length)
    if start + 4 > memory.size:
        with pytest.raises(GuestFault):
            memory.write(start, b"abcd")
        with pytest.raises(GuestFault):
            memory.read_u32(start)


@pytest.mark.parametrize(("start", "length"), [(65535, 1), (65536, 0), (65535, 2), (65536, 1), (0, 65536), (0, 65537)])
def test_pointers_at_the_edge(memory: GuestMemory, start: int, length: int) -> None:
    if start + length <= 65536:
        assert memory.read(start, length) == bytes(length)
    else:
        with pytest.raises(GuestFault):
            memory.write(start, bytes(length))


# -- modules as bytes --------------------------------------------------------------------------------------


def wat(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


@pytest.mark.parametrize(
    ("text", "num_globals", "copyable"),
    [
        ("(module)", 0, True),
        ("(module (memory 1) (global i32 (i32.const 1)))", 0, True),
        ('(module (memory 1) (export "memory" (memory 0)) (global (mut i32) (i32.const -100000)))', 1, True),
        (
            "(module (global (mut f32) (f32.const 1)) (global (mut f64) (f64.const 1)) (global (mut i64) i64.const 1))",
            3,
            True,
        ),
        ("(module (global (mut v128) (v128.const i64x2 1 2)) (global (mut i32) (i32.const 0)))", 2, False),
        (
            "(module (table 1 funcref) (elem $e func) (func i32.const 0 i32.const 0 i32.const 0 table.init $e))",
            0,
            False,
        ),
        ("(module (table 2 funcref) (func (table.copy (i32.const 0) (i32.const 1) (i32.const 1))))", 0, False),
        ('(module (func) (start 0) (data "") (memory 1))', 0, True),
    ],
)
def test_a_rewritten_module_exports_its_state(text: str, num_globals: int, copyable: bool) -> None:
    wasm = wat(text)
    rewritten = expose_state(wasm)
    assert (rewritten.num_globals, rewritten.is_copyable) == (num_globals, copyable)
    module = wasmtime.Module(wasmtime.Engine(), rewritten.wasm)
    names = {export.name for export in module.exports}
    assert {f"{rewritten.prefix}g{i}" for i in range(num_globals)} <= names
    assert (f"{rewritten.prefix}m" in names) is ("memory" in text)
    assert (f"{rewritten.prefix}s" in names) is rewritten.has_start is ("start" in text)


def test_names_that_a_module_chose_itself_are_avoided() -> None:
    rewritten = expose_state(wat('(module (memory (export "bridle:0:m") 1) (func (export "bridle:1:")))'))
    assert rewritten.prefix == "bridle:2:"


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for wasm in (data, b"\0asm\x01\0\0\0" + data):
        try:
            wasmtime.Module.validate(wasmtime.Engine(), wasm)
        except wasmtime.WasmtimeError:
            with pytest.raises(InvalidRequest):
                compile_module(wasm, DEFAULT_LIMITS)


def test_compiling_tells_what_a_module_is() -> None:
    _, facts = compile_module(guest2([NOOP]), DEFAULT_LIMITS)
    assert (facts.dialect, facts.layout, facts.old_bias, facts.problem) == (2, 2, False, "")
    _, facts = compile_module(wat("(module)"), DEFAULT_LIMITS)
    assert "aici_init" in facts.problem
    assert is_component(wat("(component)")) and not is_component(wat("(module)"))
    assert settings_key(DEFAULT_LIMITS) != settings_key(replace(DEFAULT_LIMITS, max_wasm_stack=1 << 18))


# -- constraints -------------------------------------------------------------------------------------------

CONSTRAINT_IMPORTS = """
(import "bridle" "constraint_new" (func $new (param i32 i32 i32 i32) (result i32)))
(import "bridle" "constraint_allow" (func $allow (param i32) (result i32)))
(import "bridle" "constraint_commit" (func $commit (param i32 i32 i32) (result i32)))
(import "bridle" "constraint_status" (func $status (param i32) (result i32)))
(import "bridle" "constraint_ff" (func $ff (param i32) (result i32)))
(import "bridle" "constraint_rollback" (func $rollback (param i32 i32) (result i32)))
(import "bridle" "constraint_error" (func $error (param i32) (result i32)))
(import "bridle" "constraint_free" (func $free (param i32) (result i32)))
"""


def constrained(kind: str, spec: str, *steps: list[str]) -> bytes:
    """Return a guest that creates one constraint, whose handle is `$c`."""
    quoted = "".join(f"\\{byte:02x}" for byte in spec.encode())
    raw = f'(data (i32.const 600) "{kind}") (data (i32.const 700) "{quoted}") (global $c (mut i32) (i32.const 0))'
    make = f"""(global.set $c (call $new (i32.const 600) (i32.const {len(kind)})
      (i32.const 700) (i32.const {len(spec.encode())})))"""
    return guest2(steps, create=[make], raw=raw, imports=CONSTRAINT_IMPORTS)


ALLOW = [
    "(global.set $mask (call $allow (global.get $c)))",
    result({"branches": [{"sample_mask": "#", "splices": []}]}),
]


def commit(token: int) -> str:
    store = f"(i32.store (i32.const 500) (i32.const {token}))"
    return f"{store} (drop (call $commit (global.get $c) (i32.const 500) (i32.const 1)))"


def allowed(instance: Instance) -> str:
    mid(instance)
    bits = instance.masks[-1]
    tokens = [i for i in range(257) if bits[i >> 3] >> (i & 7) & 1]
    return "".join(chr(t) if t < 256 else "$" for t in tokens)


def test_a_regex_constraint_and_its_copy(tmp_path: Path) -> None:
    sandbox = Sandbox(DEFAULT_LIMITS)
    wasm = constrained("regex", "a[bc]d?", ALLOW, [commit(ord("a")), *ALLOW], [commit(ord("b")), *ALLOW])
    instance = load(sandbox, wasm, tmp_path)
    assert allowed(instance) == "a"
    assert allowed(instance) == "bc"
    copy = instance.fork()
    assert allowed(instance) == "d$"
    assert allowed(copy) == "d$"  # it commits its own b


@pytest.mark.parametrize(
    ("kind", "spec", "first"),
    [
        ("choice", '["yes","no"]', "ny"),
        ("substring", "ab cd", "ac$"),
        ("json_schema", '{"type":"boolean"}', "ft"),
        ("lark", 'start: "x" | "z"', "xz"),
        ("yacc", "%%\na: 'x' | \"/[yz]/\" ;", "xyz"),
        ("json_object", "", "{"),
        ("constraint", '{"any_of": [{"regex": "a"}, {"sequence": ["b", "c"]}]}', "ab"),
    ],
)
def test_each_kind_of_constraint_allows_what_it_says(tmp_path: Path, kind: str, spec: str, first: str) -> None:
    instance = load(Sandbox(DEFAULT_LIMITS), constrained(kind, spec, ALLOW), tmp_path)
    assert set(first) <= set(allowed(instance)) | {"$"}
    assert "q" not in allowed(instance)


def test_forced_tokens_status_rollback_and_free(tmp_path: Path) -> None:
    show = "(call $putn (call $status (global.get $c))) (call $putc (i32.const 32)) (call $print_out)"
    steps = [
        [show, "(call $print_blob (call $ff (global.get $c)))", *END],
        [commit(ord("h")), commit(ord("i")), show, *END],
        ["(call $putn (call $rollback (global.get $c) (i32.const 1)))", show, *END],
        [
            "(call $putn (call $free (global.get $c)))",
            "(call $putn (call $free (global.get $c)))",
            "(call $print_out)",
            *END,
        ],
        [show],
    ]
    instance = load(Sandbox(DEFAULT_LIMITS), constrained("regex", "hi", *steps), tmp_path)
    mid(instance)
    assert instance.log.drain() == "0 " + "h\0\0\0i\0\0\0"
    mid(instance)
    assert instance.log.drain() in ("3 ", "1 ")
    mid(instance)
    assert instance.log.drain() == "10 "
    mid(instance)
    assert instance.log.drain() == "10"
    with pytest.raises(GuestFault, match="unknown constraint 1"):
        mid(instance)


def test_a_wrong_constraint_reports_its_error_to_the_guest(tmp_path: Path) -> None:
    show = [
        "(call $putn (call $status (global.get $c)))",
        "(call $print_out)",
        "(call $print_blob (call $error (global.get $c)))",
        *END,
    ]
    instance = load(Sandbox(DEFAULT_LIMITS), constrained("regex", "(", show), tmp_path)
    mid(instance)
    text = instance.log.drain()
    assert text.startswith("6") and len(text) > 10
    refused = load(Sandbox(DEFAULT_LIMITS), constrained("constraint", '{"regexp": "a"}', show), tmp_path)
    mid(refused)
    assert refused.log.drain().startswith("6the constraint has none of regex")
    with pytest.raises(GuestFault, match="unknown kind"):
        load(Sandbox(DEFAULT_LIMITS), constrained("yaml", "(", show), tmp_path)
    limits = replace(DEFAULT_LIMITS, max_constraint_spec=3)
    with pytest.raises(GuestFault, match="at most 3"):
        load(Sandbox(limits), constrained("regex", "abcd", show), tmp_path, limits)


ADDITIONS = """
(import "bridle" "vocab_size" (func $vocab_size (result i32)))
(import "bridle" "detokenize" (func $detokenize (param i32 i32) (result i32)))
(import "bridle" "fail" (func $fail (param i32 i32)))
(import "bridle" "constraint_new" (func $new (param i32 i32 i32 i32) (result i32)))
(import "bridle" "constraint_mask" (func $mask_of (param i32) (result i32)))
"""


def test_what_spares_guests_the_trie(tmp_path: Path) -> None:
    data = '(data (i32.const 600) "no such luck") (data (i32.const 700) "regex") (data (i32.const 720) "[ab]")'
    tokens = "(i32.store (i32.const 500) (i32.const 104)) (i32.store (i32.const 504) (i32.const 105))"
    new = "(call $new (i32.const 700) (i32.const 5) (i32.const 720) (i32.const 4))"
    steps = [
        ["(call $putn (call $vocab_size))", "(call $print_out)", *END],
        [tokens, "(call $print_blob (call $detokenize (i32.const 500) (i32.const 2)))", *END],
        [f"(call $print_blob (call $mask_of {new}))", *END],
        ["(call $fail (i32.const 600) (i32.const 12))"],
    ]
    instance = load(Sandbox(DEFAULT_LIMITS), guest2(steps, raw=data, imports=ADDITIONS), tmp_path)
    mid(instance)
    assert instance.log.drain() == str(instance.surroundings.vocabulary.size)
    mid(instance)
    assert instance.log.drain() == "hi"
    mid(instance)
    assert instance.log.drain()[12] == chr(0b110)  # bits 97 and 98
    with pytest.raises(ControllerTrap, match=r"^no such luck\nmemory:"):
        mid(instance)


@pytest.mark.parametrize(("token", "count", "error"), [(9999, 1, "token 9999 is outside"), (1, 1 << 20, "at most")])
def test_detokenizing_is_checked(tmp_path: Path, token: int, count: int, error: str) -> None:
    store = f"(i32.store (i32.const 500) (i32.const {token}))"
    step = [store, f"(drop (call $detokenize (i32.const 500) (i32.const {count})))", *END]
    instance = load(Sandbox(DEFAULT_LIMITS), guest2([step], imports=ADDITIONS), tmp_path)
    with pytest.raises(GuestFault, match=error):
        mid(instance)


# -- small parts -------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_logs_keep_the_newest(pieces: list[bytes]) -> None:
    log = LogBuffer(64)
    for piece in pieces:
        log.write(piece)
    written = b"".join(pieces)
    kept = log.drain()
    assert len(kept) <= 64 and written.decode(errors="replace").endswith(kept[-16:])
    assert log.drain() == ""


@given(st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=3), st.booleans(), st.integers(0, 4)), max_size=12))
def test_variables_change_only_at_the_version_that_is_named(writes: list[tuple[str, bytes, bool, int]]) -> None:
    """Variables are compared to a plain dictionary. A version of 0 means no condition."""
    variables = SharedVariables(DEFAULT_LIMITS)
    model: dict[str, tuple[int, bytes]] = {}
    for name, value, append, when in writes:
        command = WriteVar(name, value.hex(), "Append" if append else "Set", when or None)
        reply = msgspec.json.decode(variables.execute(command))
        version, old = model.get(name, (0, b""))
        if when and when != version:
            expected = {"ReadVar": {"version": version, "value": old.hex()}} if version else {"VariableMissing": {}}
        else:
            model[name] = (version + 1, old + value if append and version else value)
            expected = {"WriteVar": {"version": version + 1}}
        assert reply == expected
        assert variables.version(name) == model.get(name, (0, b""))[0]
    for name, (version, value) in model.items():
        reply = msgspec.json.decode(variables.execute(ReadVar(name)))
        assert reply == {"ReadVar": {"version": version, "value": value.hex()}}


def test_a_wasmtime_that_was_not_tested_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_metadata, "WASMTIME_VERSION", "51.0.0")
    monkeypatch.delitem(sys.modules, wasm_calls.__name__)
    with pytest.raises(ImportError, match=r"wasmtime: got 51\.0\.0; .*pip install 'wasmtime>=50\.0\.1,<51'"):
        importlib.import_module(wasm_calls.__name__)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "wasmtime>=50.0.1,<51" in str(declared)
