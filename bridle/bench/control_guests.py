"""Controllers for `bridle bench control` as WebAssembly text, and a vocabulary for these controllers.

`trivial` allows every token. `walk` computes its set of allowed tokens by walking the whole token trie with a small
automaton, as a regular expression does. `script` returns answers that were prepared in advance. Only wasmtime is needed
to build these controllers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

# Addresses: scratch below 0x1000, stack of automaton states at 0x1000, then the automaton's table, the allow-set at
# 0x10000, data of further guests at 0x20000, prompts at 0x100000, the trie at 0x200000.
_TABLE = 0x2000

_MODULE = """(module
  (import "env" "aici_host_return_process_result" (func $return (param i32 i32)))
  (import "env" "aici_host_return_logit_bias" (func $bias (param i32) (result i32)))
  (import "env" "aici_host_process_arg" (func $process_arg (result i32)))
  (import "env" "aici_host_token_trie" (func $token_trie (result i32)))
  (import "env" "aici_host_read_blob" (func $read_blob (param i32 i32 i32) (result i32)))
  (memory (export "memory") %PAGES%)
  (global $out (mut i32) (i32.const 0))
  (global $step (mut i32) (i32.const 0))
  (func $put (param $at i32) (param $n i32)
    (memory.copy (global.get $out) (local.get $at) (local.get $n))
    (global.set $out (i32.add (global.get $out) (local.get $n))))
  (func $number (param $v i32)
    (if (i32.ge_u (local.get $v) (i32.const 10)) (then (call $number (i32.div_u (local.get $v) (i32.const 10)))))
    (i32.store8 (global.get $out) (i32.add (i32.const 48) (i32.rem_u (local.get $v) (i32.const 10))))
    (global.set $out (i32.add (global.get $out) (i32.const 1))))
  (func $sample (local $row i32)
    (local.set $row (call $bias (i32.const 0x10000)))
    (global.set $out (i32.const 0x800))
    (call $put (i32.const 0x100) (i32.const 28))
    (call $number (local.get $row))
    (call $put (i32.const 0x140) (i32.const 16))
    (call $return (i32.const 0x800) (i32.sub (global.get $out) (i32.const 0x800))))
  (func (export "aici_init"))
  (func (export "aici_init_prompt") (param i32)
    (call $return (i32.const 0x100000)
      (call $read_blob (call $process_arg) (i32.const 0x100000) (i32.const 0xf0000))))
  (data (i32.const 0x100) "{\\22branches\\22:[{\\22sample_mask\\22:")
  (data (i32.const 0x140) ",\\22splices\\22:[]}]}")
  %BODY%)"""

#: Code that fills the allow-set.
EVERYTHING = "(memory.fill (i32.const 0x10000) (i32.const 0xff) (i32.const 0x8000))"

_WALK = """
  (global $nodes (mut i32) (i32.const 0))
  (global $end (mut i32) (i32.const 0))
  (func (export "aici_create") (result i32)
    (drop (call $read_blob (call $token_trie) (i32.const 0x200000) (i32.const 0x1e00000)))
    (global.set $nodes (i32.add (i32.const 0x200000) (i32.load (i32.const 0x200004))))
    (global.set $end (i32.add (global.get $nodes) (i32.load (i32.const 0x200008))))
    (i32.const 1))
  (func (export "aici_mid_process") (param i32)
    (call $walk (i32.rem_u (global.get $step) (i32.const 3)))
    (global.set $step (i32.add (global.get $step) (i32.const 1)))
    (call $sample))
  (func $walk (param $state i32) (local $at i32) (local $a i32) (local $b i32) (local $top i32) (local $next i32)
    (memory.fill (i32.const 0x10000) (i32.const 0) (i32.const 0x8000))
    (local.set $top (i32.const 0x1000))
    (i32.store8 (local.get $top) (local.get $state))
    (local.set $at (i32.add (global.get $nodes) (i32.const 8)))
    (block $done (loop $node
      (br_if $done (i32.ge_u (local.get $at) (global.get $end)))
      (local.set $a (i32.load (local.get $at)))
      (local.set $b (i32.load offset=4 (local.get $at)))
      (local.set $next (i32.load8_u offset=0x2000 (i32.add
        (i32.shl (i32.load8_u (local.get $top)) (i32.const 8)) (i32.and (local.get $a) (i32.const 255)))))
      (if (i32.ne (local.get $next) (i32.const 255))
        (then
          (local.set $top (i32.add (local.get $top) (i32.const 1)))
          (i32.store8 (local.get $top) (local.get $next))
          (local.set $a (i32.shr_u (local.get $a) (i32.const 8)))
          (if (i32.ne (local.get $a) (i32.const 0xffffff)) (then
            (i32.store8 offset=0x10000 (i32.shr_u (local.get $a) (i32.const 3))
              (i32.or (i32.load8_u offset=0x10000 (i32.shr_u (local.get $a) (i32.const 3)))
                (i32.shl (i32.const 1) (i32.and (local.get $a) (i32.const 7)))))))
          (if (i32.eq (i32.shr_u (local.get $b) (i32.const 8)) (i32.const 1)) (then
            (local.set $top (i32.sub (local.get $top) (i32.and (local.get $b) (i32.const 255))))))
          (local.set $at (i32.add (local.get $at) (i32.const 8))))
        (else
          (local.set $top (i32.add (i32.sub (local.get $top) (i32.and (local.get $b) (i32.const 255))) (i32.const 1)))
          (local.set $at (i32.add (local.get $at) (i32.shl (i32.shr_u (local.get $b) (i32.const 8)) (i32.const 3))))))
      (br $node))))"""


def trivial() -> bytes:
    """Return a controller that always allows every token."""
    body = f"""(func (export "aici_create") (result i32) {EVERYTHING} (i32.const 1))
      (func (export "aici_mid_process") (param i32) (call $sample))"""
    return build(body, 48)


def walk() -> bytes:
    """Return a controller whose automaton has three states: it allows short words, spaces and numbers."""
    table = [bytearray(b"\xff" * 256) for _ in range(3)]
    for byte in b"abcdefgh":
        table[0][byte] = table[1][byte] = 1
    for byte in b"0123456789":
        table[0][byte] = table[2][byte] = 2
    table[1][32] = table[2][46] = 0
    return build(data_at(_TABLE, b"".join(table)) + _WALK, 1024)


def data_at(address: int, content: bytes) -> str:
    """Return a data segment."""
    return f'(data (i32.const {address}) "{"".join(f"{chr(92)}{byte:02x}" for byte in content)}")\n'


def build(body: str, pages: int) -> bytes:
    """Return a controller whose functions are `body` (WebAssembly text), with `pages` pages of memory."""
    import wasmtime

    return bytes(wasmtime.wat2wasm(_MODULE.replace("%PAGES%", str(pages)).replace("%BODY%", body)))


# -- a vocabulary ------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, vocab_size: int, *, seed: int = 0) -> Path:
    """Write a byte-level tokenizer of `vocab_size` tokens that resemble those of a real one: words, word pieces and
    numbers. Return the folder."""
    names = _byte_names()
    rng = random.Random(seed)
    vocab = {name: number for number, name in enumerate(names)}
    parts = ("bcdfghklmnprstvw", "aeiou", ("", "n", "s", "l"))
    syllables = ["".join(rng.choice(part) for part in parts) for _ in range(300)]
    while len(vocab) < vocab_size - 1:
        word = "".join(rng.choice(syllables) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        kind = rng.random()
        word = str(rng.randrange(10_000)) if kind < 0.05 else word.capitalize() if kind < 0.2 else word
        vocab.setdefault(names[32] + word if rng.random() < 0.5 else word, len(vocab))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    data = {
        "version": "1.0",
        "added_tokens": [{"id": vocab_size - 1, "content": "</s>", **flags}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def _byte_names() -> list[str]:
    """Return the printable character that represents each byte in byte-level vocabularies."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
