"""More controllers as WebAssembly text: `script` returns prepared answers; `padded` and `heavy` make modules large."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from bridle.bench.control_guests import EVERYTHING, build, data_at

#: An answer of `script` that samples freely instead of splicing.
SAMPLE = ""

_TEXT, _TEXT_END = 0x20000, 0x100000  # addresses


def script(answers: Sequence[str]) -> bytes:
    """Return a controller that gives the answers one after the other, and then repeats the last answer. An answer is a
    result as JSON, or `SAMPLE`."""
    at, data, body = _TEXT, "", ""
    for number, answer in enumerate(answers):
        test = "i32.ge_u" if number == len(answers) - 1 else "i32.eq"
        say = f"(call $return (i32.const {at}) (i32.const {len(answer)}))" if answer else "(call $sample)"
        body += f"(if ({test} (local.get $step) (i32.const {number})) (then {say} (return)))\n"
        data += data_at(at, answer.encode())
        at += len(answer)
    if at > _TEXT_END:
        raise ValueError(f"the answers have {at - _TEXT} characters; at most {_TEXT_END - _TEXT}")
    return build(
        f"""{data} (func (export "aici_create") (result i32) {EVERYTHING} (i32.const 1))
        (func (export "aici_mid_process") (param i32) (local $step i32)
          (local.set $step (global.get $step))
          (global.set $step (i32.add (global.get $step) (i32.const 1)))
          {body})""",
        48,
    )


def splice(tokens: Sequence[int], backtrack: int = 0) -> str:
    """Return the JSON of an answer that forces `tokens`."""
    one = {"when_sampled": [], "backtrack": backtrack, "ff_tokens": list(tokens)}
    return json.dumps({"branches": [{"sample_mask": None, "splices": [one]}]})


def padded(wasm: bytes, num_bytes: int, seed: int = 0) -> bytes:
    """Return the module with a custom section of `num_bytes` random bytes, to test large uploads and stored modules."""
    content = random.Random(seed).randbytes(num_bytes)
    section = _leb(3) + b"pad" + content
    return wasm + b"\0" + _leb(len(section)) + section


def heavy(num_functions: int) -> bytes:
    """Return a module that takes long to compile: `trivial` with `num_functions` more functions."""
    extra = []
    for number in range(num_functions):
        steps = "".join(
            f"(local.set $x (i32.xor (i32.mul (local.get $x) (i32.const {number * 31 + k})) (local.get $y)))"
            f"(if (i32.and (local.get $x) (i32.const {1 << k % 20})) (then (local.set $y (local.get $x))))"
            for k in range(40)
        )
        extra.append(f'(func (export "f{number}") (param $x i32) (param $y i32) (result i32) {steps} (local.get $x))')
    body = f"""(func (export "aici_create") (result i32) {EVERYTHING} (i32.const 1))
      (func (export "aici_mid_process") (param i32) (call $sample))"""
    return build(body + "".join(extra), 48)


def _leb(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
