"""Controllers for tests. Small Python functions write them as WebAssembly text, from one list of actions for each call.

`guest2([step, step, ...])` is a controller of dialect 2 whose n-th mid callback performs the n-th step (the last one
again and again). A step is a list of actions, and an action is WAT text. In a result, `#` means the last mask, and
`$0`, `$1`, ... mean earlier masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import wasmtime

Step = Sequence[str]

_OUT, _ARGUMENT, _DATA = 0x8000, 0x10000, 0x20000

_PRELUDE = """
(import "env" "aici_host_return_process_result" (func $return (param i32 i32)))
(import "env" "aici_host_process_arg" (func $process_arg (result i32)))
(import "env" "aici_host_module_arg" (func $module_arg (result i32)))
(import "env" "aici_host_token_trie" (func $token_trie (result i32)))
(import "env" "aici_host_tokens" (func $tokens (result i32)))
(import "env" "aici_host_tokenize" (func $tokenize (param i32 i32) (result i32)))
(import "env" "aici_host_read_blob" (func $read_blob (param i32 i32 i32) (result i32)))
(import "env" "aici_host_self_seq_id" (func $self (result i32)))
(import "env" "aici_host_storage_cmd" (func $storage (param i32 i32) (result i32)))
(import "env" "aici_host_eos_token" (func $eos (result i32)))
(import "env" "aici_host_get_config" (func $config (param i32 i32) (result i32)))
(import "env" "aici_host_stop" (func $stop))
(import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
(import "wasi_snapshot_preview1" "proc_exit" (func $proc_exit (param i32)))
(import "wasi_snapshot_preview1" "clock_time_get" (func $clock (param i32 i64 i32) (result i32)))
(import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
(import "wasi_snapshot_preview1" "path_open"
  (func $path_open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
%IMPORTS%
(memory (export "memory") 16)
(global $length (mut i32) (i32.const 0))
%GLOBALS%
(func $puts (param $p i32) (param $n i32)
  (memory.copy (i32.add (i32.const 0x8000) (global.get $length)) (local.get $p) (local.get $n))
  (global.set $length (i32.add (global.get $length) (local.get $n))))
(func $putc (param $c i32)
  (i32.store8 (i32.add (i32.const 0x8000) (global.get $length)) (local.get $c))
  (global.set $length (i32.add (global.get $length) (i32.const 1))))
(func $putn (param $v i32)
  (if (i32.ge_u (local.get $v) (i32.const 10)) (then (call $putn (i32.div_u (local.get $v) (i32.const 10)))))
  (call $putc (i32.add (i32.const 48) (i32.rem_u (local.get $v) (i32.const 10)))))
(func $print (param $p i32) (param $n i32)
  (i32.store (i32.const 16) (local.get $p)) (i32.store (i32.const 20) (local.get $n))
  (drop (call $fd_write (i32.const 1) (i32.const 16) (i32.const 1) (i32.const 24))))
(func $print_out (call $print (i32.const 0x8000) (global.get $length)) (global.set $length (i32.const 0)))
(func $print_blob (param $blob i32) (local $n i32)
  (local.set $n (call $read_blob (local.get $blob) (i32.const 0x10000) (i32.const 0xf000)))
  (call $print (i32.const 0x10000) (local.get $n)))
(func $deep (param i32) (result i32) (i32.add (call $deep (i32.add (local.get 0) (i32.const 1))) (i32.const 1)))
;; the place of this sequence in the fork group of the process argument
(func $my_index (result i32) (local $n i32) (local $i i32) (local $v i32) (local $c i32) (local $k i32)
  (local.set $n (call $read_blob (call $process_arg) (i32.const 0x10000) (i32.const 0xf000)))
  (local.set $i (i32.const 0x10000))
  (block $found (loop $search
    (br_if $found (i64.eq (i64.load (local.get $i)) (i64.const 0x3a2270756f72675f))) ;; _group":
    (local.set $i (i32.add (local.get $i) (i32.const 1)))
    (br_if $search (i32.lt_u (local.get $i) (i32.add (i32.const 0x10000) (local.get $n))))
    (unreachable)))
  (local.set $i (i32.add (local.get $i) (i32.const 9)))
  (loop $digits
    (local.set $c (i32.load8_u (local.get $i)))
    (local.set $i (i32.add (local.get $i) (i32.const 1)))
    (if (i32.and (i32.ge_u (local.get $c) (i32.const 48)) (i32.le_u (local.get $c) (i32.const 57)))
      (then
        (local.set $v (i32.add (i32.mul (local.get $v) (i32.const 10)) (i32.sub (local.get $c) (i32.const 48))))
        (br $digits)))
    (if (i32.eq (local.get $v) (call $self)) (then (return (local.get $k))))
    (local.set $v (i32.const 0))
    (local.set $k (i32.add (local.get $k) (i32.const 1)))
    (br_if $digits (i32.eq (local.get $c) (i32.const 44))))
  (i32.const -1))
"""


def _place(data: bytes) -> str:
    """Return a placeholder for the address of some bytes, until a module is built."""
    return f"@{data.hex()}@"


def _text(data: bytes) -> str:
    return f"(i32.const {_place(data)}) (i32.const {len(data)})"


# -- actions -----------------------------------------------------------------------------------------------


def say(text: str) -> str:
    """Return an action that prints a text."""
    return f"(call $print {_text(text.encode())})"


def mask(tokens: Sequence[int], vocab_size: int, new: bool = True) -> str:
    """Return an action that gives a set of tokens to the host as a mask."""
    row = bytearray(4 * ((vocab_size + 31) // 32) + 4)
    for token in tokens:
        row[token >> 3] |= 1 << (token & 7)
    place = _place(bytes(row))
    if not new:
        return f"(call $bias (i32.const {place}))"
    return f"""(global.set $mask (call $bias (i32.const {place})))
      (i32.store (i32.add (i32.const 64) (i32.shl (global.get $masks) (i32.const 2))) (global.get $mask))
      (global.set $masks (i32.add (global.get $masks) (i32.const 1)))"""


def result(value: Any) -> str:
    """Return an action that returns JSON to the host. A text is used as JSON without change."""
    template = value if isinstance(value, str) else json.dumps(value)
    parts = ["(global.set $length (i32.const 0))"]
    for piece in re.split(r"(\"?#\"?|\"?\$\d\"?)", template):
        name = piece.strip('"')
        if name == "#":
            parts.append("(call $putn (global.get $mask))")
        elif name.startswith("$") and len(name) == 2:
            parts.append(f"(call $putn (i32.load (i32.const {64 + 4 * int(name[1])})))")
        elif piece:
            parts.append(f"(call $puts {_text(piece.encode())})")
    parts.append("(call $return (i32.const 0x8000) (global.get $length)) (global.set $length (i32.const 0))")
    return "\n".join(parts)


def store(name: str, value: str, op: str = "Set", when: int | None = None) -> str:
    """Return an action that writes a shared variable and prints the host's answer."""
    command = {"WriteVar": {"name": name, "value": value, "op": op, "when_version_is": when}}
    return f"(call $print_blob (call $storage {_text(json.dumps(command).encode())}))"


def load(name: str) -> str:
    """Return an action that reads a shared variable and prints the host's answer."""
    return f"(call $print_blob (call $storage {_text(json.dumps({'ReadVar': {'name': name}}).encode())}))"


def by_branch(*steps: Step) -> str:
    """Return a step that does the n-th given step in the n-th sequence of the fork group."""
    text = ""
    for index, step in enumerate(steps):
        text += f"(if (i32.eq (call $my_index) (i32.const {index})) (then {chr(10).join(step)}))\n"
    return text


SHOW_ARGUMENT = "(call $print_blob (call $process_arg))"
SHOW_MODULE_ARGUMENT = "(call $print_blob (call $module_arg))"
SHOW_SELF = "(call $putn (call $self)) (call $print_out)"
TRAP = "(unreachable)"
LOOP = "(loop $forever (br $forever))"
EXIT = "(call $proc_exit (i32.const 3))"
STOP = "(call $stop)"
DEEP = "(drop (call $deep (i32.const 0)))"
HOST_FLOOD = "(loop $forever (drop (call $eos)) (br $forever))"
LOG_FLOOD = f"(loop $forever (call $print (i32.const {_DATA}) (i32.const 0x8000)) (br $forever))"
EAT_MEMORY = """(loop $more (br_if $more (i32.ge_s (memory.grow (i32.const 16)) (i32.const 0)))) (unreachable)"""
BAD_RESULT_POINTER = "(call $return (i32.const 0xfffffff0) (i32.const 0x100))"
BAD_READ_POINTER = "(drop (call $read_blob (call $token_trie) (i32.const 0xffff0) (i32.const 0x100000)))"
BAD_VECTOR_POINTER = (
    "(i32.store (i32.const 16) (i32.const 0x7fffffff)) (i32.store (i32.const 20) (i32.const 64))"
    "(drop (call $fd_write (i32.const 1) (i32.const 16) (i32.const 1) (i32.const 24)))"
)
BAD_BLOB = "(drop (call $read_blob (i32.const 77) (i32.const 0x10000) (i32.const 16)))"
NOTHING = ""
SAMPLE_ALL_OF = "#"


def sample(tokens: Sequence[int], vocab_size: int, **more: Any) -> list[str]:
    """Return a step that samples one of the given tokens."""
    return [mask(tokens, vocab_size), result({"branches": [{"sample_mask": "#", "splices": [], **more}]})]


def splice(tokens: Sequence[int], backtrack: int = 0) -> dict[str, Any]:
    """Return a branch that appends tokens without sampling."""
    return {"sample_mask": None, "splices": [{"when_sampled": [], "backtrack": backtrack, "ff_tokens": list(tokens)}]}


def force(tokens: Sequence[int], backtrack: int = 0) -> list[str]:
    """Return a step that appends tokens."""
    return [result({"branches": [splice(tokens, backtrack)]})]


NOOP = [result({"branches": [splice([])]})]
END = [result({"branches": []})]


# -- modules -----------------------------------------------------------------------------------------------


def guest2(
    steps: Sequence[Step],
    *,
    create: Step = (),
    init: Step = (),
    prompt: Sequence[int] | None = None,
    raw: str = "",
    imports: str = "",
) -> bytes:
    """Return a controller of dialect 2 (from D2.1 on) as a Wasm module."""
    prompt_result = [result({"prompt": list(prompt)})] if prompt is not None else [_ECHO_PROMPT]
    functions = _callback("aici_mid_process", steps) + _callback("aici_init_prompt", [[*init, *prompt_result]])
    return _build(functions + raw, create, "(func $bias (param i32) (result i32))", imports)


def guest1(
    pre: Sequence[Step], mid: Sequence[Step], post: Sequence[Step], *, create: Step = (), init: Step = ()
) -> bytes:
    """Return a controller of dialect 1 as a Wasm module."""
    functions = (
        _callback("aici_pre_process", pre)
        + _callback("aici_mid_process", mid)
        + _callback("aici_post_process", post)
        + _callback("aici_init_prompt", [[*init, result({})]])
    )
    return _build(functions, create, "(func $bias (param i32))")


#: A D2 guest that leaves the prompt as it is: the argument already is the result.
_ECHO_PROMPT = """(call $return (i32.const 0x10000)
  (call $read_blob (call $process_arg) (i32.const 0x10000) (i32.const 0xf000)))"""


def _callback(name: str, steps: Sequence[Step]) -> str:
    """Return a callback that runs one step per call. A global that is not exported holds the number of the step."""
    body = ""
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        test = (
            f"(i32.ge_u (global.get $at_{name}) (i32.const {index}))"
            if last
            else (f"(i32.eq (global.get $at_{name}) (i32.const {index}))")
        )
        advance = "" if last else f"(global.set $at_{name} (i32.const {index + 1}))"
        actions = "\n".join(step)
        body += f"(if {test} (then {advance} {actions} (return)))\n"
    return f'(func (export "{name}") (param i32) (global.set $masks (i32.const 0)) {body})\n'


def _build(functions: str, create: Step, bias: str, more: str = "") -> bytes:
    creating = "\n".join(create)
    names = re.findall(r"\$at_(aici_\w+)", functions)
    counters = "".join(f"(global $at_{name} (mut i32) (i32.const 0))\n" for name in sorted(set(names)))
    counters += "(global $mask (mut i32) (i32.const 0)) (global $masks (mut i32) (i32.const 0))\n"
    imports = f'(import "env" "aici_host_return_logit_bias" {bias}) {more}'
    prelude = _PRELUDE.replace("%IMPORTS%", imports).replace("%GLOBALS%", counters)
    data = bytearray()

    def address(found: re.Match[str]) -> str:
        data.extend(bytes.fromhex(found[1]))
        return str(_DATA + len(data) - len(found[1]) // 2)

    body = re.sub("@([0-9a-f]*)@", address, f"{creating}\0{functions}")
    creating, functions = body.split("\0")
    escaped = "".join(f"\\{byte:02x}" for byte in data)
    wat = f"""(module {prelude}
      (func (export "aici_init"))
      (func (export "aici_create") (result i32) {creating} (i32.const 7))
      {functions}
      (data (i32.const {_DATA}) "{escaped}"))"""
    return bytes(wasmtime.wat2wasm(wat))


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
    """Return a component whose n-th call of `next` does the n-th step. Each step sets its decision with `$decide`."""
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
    """Return a data segment, and the address and length of each piece in it."""
    data, numbers, place = "", [], 1024
    for piece in pieces:
        raw = (piece if isinstance(piece, str) else json.dumps(piece)).encode()
        data += f'(data (i32.const {place}) "{"".join(f"{chr(92)}{b:02x}" for b in raw)}")'
        numbers.append(f"(i32.const {place}) (i32.const {len(raw)})")
        place += len(raw) + 8
    return data, numbers
