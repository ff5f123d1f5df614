"""Generated Wasm modules: mutated modules, modules with shuffled sections, and valid modules with random code. The
random code calls every function of a host with random arguments. A seed determines the modules."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache

import wasmtime

from bridle.aici.runtime import constraints, host, wasi
from bridle.aici.runtime.wasm import HostFunction
from bridle.aici.runtime.wasm_binary import encode_leb, sections
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import END, NOOP, component, force, guest1, guest2, load, result, sample, say, store, texts

_HOST: tuple[HostFunction, ...] = (*host.FUNCTIONS, host.BIAS_NEW, *wasi.FUNCTIONS, *constraints.FUNCTIONS)
_INTERESTING = (0, 1, -1, 2, 7, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0xFFFFF, 0x7FFFFFFF, -0x80000000)
_BINARY = ("add", "sub", "mul", "div_u", "rem_s", "and", "or", "xor", "shl", "shr_u", "rotl", "eq", "lt_s", "ge_u")


@cache
def corpus() -> tuple[bytes, ...]:
    """Return valid modules of both dialects, and a component."""
    steps = [[say("x"), *sample([65, 66], VOCAB_SIZE)], force([7, 8]), [store("v", "00"), load("v"), *NOOP], END]
    old = guest1([[result({"suspend": True})]], [[result({"SampleWithBias": {}})]], [[result({"stop": False})]])
    data, (noop,) = texts({"branches": [{"splices": [{"when_sampled": [], "backtrack": 0, "ff_tokens": []}]}]})
    return guest2(steps), guest2([END], prompt=[1, 2]), old, component([[f"(call $decide {noop})"]] * 2, data=data)


def make_module(seed: int) -> bytes:
    """Make the Wasm module for a random seed."""
    rng = random.Random(seed)
    make: Callable[[random.Random], bytes] = rng.choice(
        (_mutated, _shuffled, _random_code, _random_code, _random_answer)
    )
    return make(rng)


# -- broken ones -----------------------------------------------------------------------------------------------


def _mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(corpus()))
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(8 if rng.random() < 0.9 else 0, len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del data[place : place + rng.randint(1, 16)]
        else:
            data[place:place] = data[place : place + rng.randint(1, 16)]
    return bytes(data)


def _shuffled(rng: random.Random) -> bytes:
    """Return a core module whose sections are left out, doubled, swapped, or have a wrong size."""
    parts = list(sections(rng.choice(corpus()[:3])))
    for _ in range(rng.randint(1, 3)):
        place, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        kind = rng.randrange(4)
        if kind == 0 and len(parts) > 1:
            del parts[place]
        elif kind == 1:
            parts.insert(other, parts[place])
        elif kind == 2:
            parts[place], parts[other] = parts[other], parts[place]
        else:
            parts[place] = rng.randrange(14), parts[other][1]
        if not parts:
            break
    out = bytearray(b"\0asm\x01\0\0\0")
    for number, body in parts:
        size = len(body) if rng.random() < 0.9 else rng.choice((0, len(body) + 1, 1 << 31, len(body) // 2))
        out += bytes([number]) + encode_leb(size) + body
    return bytes(out)


# -- valid ones ------------------------------------------------------------------------------------------------


def _random_code(rng: random.Random) -> bytes:
    """Return a module whose callbacks call the host at random."""
    code = _Code(rng)
    prompt = "(call $answer (i32.const 1024) (i32.const 2))"
    mid = "(call $answer (i32.const 1040) (i32.const 99))"
    bodies = {
        "aici_init": "",
        "aici_create": "(i32.const 7)",
        "aici_init_prompt": prompt if rng.random() < 0.9 else "",
        "aici_mid_process": mid if rng.random() < 0.9 else "",
    }
    functions = ""
    for name, end in bodies.items():
        kind = "" if name in ("aici_init", "aici_create") else "(param i32)"
        gives = "(result i32)" if name == "aici_create" else ""
        weight = 5 if name == "aici_mid_process" else 1
        functions += (
            f'(func (export "{name}") {kind} {gives} (local $a i32) (local $b i64) {code.statements(weight)} {end})\n'
        )
    noop = json.dumps({"branches": [{"splices": [{"when_sampled": [], "backtrack": 0, "ff_tokens": []}]}]})
    return _build(code, functions, "{}", noop.ljust(99))


def _random_answer(rng: random.Random) -> bytes:
    """Return a module with valid code that returns JSON with small errors."""
    code = _Code(rng)
    first, second = _answer(rng, rng.choice(("prompt", "branches"))), _answer(rng, "branches")
    masks = "(drop (call $aici_host_return_logit_bias (i32.const 2048)))" if rng.random() < 0.7 else ""
    if len(first) > 16:
        first = b"{}"
    functions = f"""(func (export "aici_init")) (func (export "aici_create") (result i32) (i32.const 1))
      (func (export "aici_init_prompt") (param i32) (call $answer (i32.const 1024) (i32.const {len(first)})))
      (func (export "aici_mid_process") (param i32)
        {masks} (call $answer (i32.const 1040) (i32.const {len(second)})))"""
    return _build(code, functions, first.decode("latin-1"), second.decode("latin-1"))


def _answer(rng: random.Random, key: str) -> bytes:
    """Return random JSON that is similar to `{"branches": [...]}`."""
    if rng.random() < 0.1:
        return rng.choice((b"", b"null", b"[]", b"{", b"[" * 400, b'{"branches":[{}', b"\xff\xfe", b'"Stop"', b"1e999"))

    def value(depth: int) -> object:
        options: list[Callable[[], object]] = [
            lambda: rng.choice(_INTERESTING),
            lambda: rng.choice((None, True, "x", "", 1.5, -0.0, 1e308, 2**70, [], {}, float("nan"))),
        ]
        if depth:
            options += [lambda: [value(depth - 1) for _ in range(rng.randint(0, 3))], splice, wait]
        return rng.choice(options)()

    def splice() -> object:
        names = ("when_sampled", "backtrack", "ff_tokens")
        good = {"when_sampled": [], "backtrack": rng.randint(0, 3), "ff_tokens": [rng.randrange(VOCAB_SIZE)]}
        return {name: good[name] if rng.random() < 0.8 else value(1) for name in names if rng.random() < 0.95}

    def wait() -> object:
        return {"variable": rng.choice(("x", None, 5)), "newer_than": value(0), "ms": rng.choice((None, 1, -1, 1e300))}

    def branch() -> object:
        good = {"sample_mask": rng.choice((None, 1, 1, 2)), "temperature": None, "splices": [splice()]}
        more = {
            "bias": [[1, 0.5]],
            "sampling": {"top_p": 0.5},
            "top_logprobs": 3,
            "draft": [1, 2],
            "wait": True,
            "waits_for": [["x", 1]],
        }
        for name, known in more.items():
            if rng.random() < 0.15:
                good[name] = known if rng.random() < 0.6 else value(2)
        return good if rng.random() < 0.9 else value(2)

    filled: dict[str, object] = {key: [branch() for _ in range(rng.choice((0, 1, 1, 1, 2, 20)))]}
    if key == "prompt":
        filled = {"prompt": value(1)}
    if rng.random() < 0.1:
        filled["wait"] = wait()
    return json.dumps(filled).encode()


def _build(code: _Code, functions: str, first: str, second: str) -> bytes:
    escaped = ["".join(f"\\{byte:02x}" for byte in text.encode("latin-1", "replace")) for text in (first, second)]
    wat = f"""(module {code.imports}
      (type $unary (func (param i32) (result i32)))
      (memory (export "memory") {code.rng.choice((1, 1, 2, 16))})
      (table 4 funcref) (elem (i32.const 0) $id $id)
      (global $counter (mut i32) (i32.const 0))
      (func $id (param i32) (result i32) (local.get 0))
      (func $answer (param i32 i32) (call $aici_host_return_process_result (local.get 0) (local.get 1)))
      {functions}
      (data (i32.const 1024) "{escaped[0]}") (data (i32.const 1040) "{escaped[1]}"))"""
    return bytes(wasmtime.wat2wasm(wat))


class _Code:
    """A generator of random, well-typed statements and expressions."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.imports = "".join(map(_import, _HOST))
        self._loops = 0

    def statements(self, weight: int) -> str:
        return "\n".join(self._statement(3) for _ in range(self.rng.randint(0, 2 * weight)))

    def _statement(self, depth: int) -> str:
        rng = self.rng
        kind = rng.randrange(20)
        if kind < 8:
            return self._host_call()
        if kind < 11:
            return f"(local.set $a {self.i32(depth)})"
        if kind < 12:
            return f"(local.set $b {self.i64(depth)})"
        if kind < 14:
            return f"(i32.store{rng.choice(('', '8', '16'))} {self.i32(depth)} {self.i32(depth)})"
        if kind < 15:
            return f"(global.set $counter {self.i32(depth)})"
        if kind < 16:
            return f"(memory.fill {self.i32(1)} {self.i32(1)} {self.i32(1)})"
        if depth and kind < 18:
            return f"(if {self.i32(depth - 1)} (then {self._statement(depth - 1)}) (else {self._statement(depth - 1)}))"
        if depth and kind < 19:
            self._loops += 1
            name = f"$loop{self._loops}"
            return f"(loop {name} {self._statement(depth - 1)} (br_if {name} {self.i32(depth - 1)}))"
        return rng.choice(("(nop)", "(unreachable)", "(nop)", "(return)")) if depth < 3 else "(nop)"

    def _host_call(self) -> str:
        function = self.rng.choice(_HOST)
        if function.name in ("proc_exit", "aici_host_stop") and self.rng.random() < 0.9:
            return "(nop)"
        arguments = " ".join(self.i64(1) if kind == "I" else self.i32(2) for kind in function.params)
        call = f"(call ${function.name} {arguments})"
        return f"(local.set $a {call})" if function.has_result else call

    def i32(self, depth: int) -> str:
        rng = self.rng
        if not depth or rng.random() < 0.4:
            near = rng.choice((rng.choice(_INTERESTING), rng.randrange(4096), rng.randrange(64)))
            return rng.choice((f"(i32.const {near})", f"(i32.const {near})", "(local.get $a)", "(global.get $counter)"))
        return rng.choice(
            (
                lambda: f"(i32.{rng.choice(_BINARY)} {self.i32(depth - 1)} {self.i32(depth - 1)})",
                lambda: f"(i32.load{rng.choice(('', '8_u', '16_s'))} {self.i32(depth - 1)})",
                lambda: f"(i32.wrap_i64 {self.i64(depth - 1)})",
                lambda: f"(memory.grow (i32.const {rng.choice((0, 1, 2, 100, 70000))}))",
                lambda: f"(call_indirect (type $unary) {self.i32(0)} (i32.const {rng.randrange(5)}))",
                lambda: f"(i32.trunc_f64_s (f64.convert_i64_s {self.i64(depth - 1)}))",
            )
        )()

    def i64(self, depth: int) -> str:
        if not depth or self.rng.random() < 0.5:
            return self.rng.choice((f"(i64.const {self.rng.choice(_INTERESTING)})", "(local.get $b)"))
        return f"(i64.{self.rng.choice(_BINARY[:11])} {self.i64(depth - 1)} (i64.extend_i32_u {self.i32(depth - 1)}))"


def _import(function: HostFunction) -> str:
    types = " ".join("i64" if kind == "I" else "i32" for kind in function.params)
    gives = "(result i32)" if function.has_result else ""
    return f'(import "{function.module}" "{function.name}" (func ${function.name} (param {types}) {gives}))'
