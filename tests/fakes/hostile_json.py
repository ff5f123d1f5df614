"""Hostile JSON: large, deep, or with values that are not numbers. Bodies are texts, because JSON writers would refuse
some of them."""

from __future__ import annotations

from collections.abc import Mapping


def hostile_values(num_bytes: int, many: int = 1_000_000) -> Mapping[str, bytes]:
    """Return hostile values by the name of their fault. Large values have about `num_bytes` bytes, or `many` entries if
    that is less."""

    def repeated(item: bytes, most: int = num_bytes) -> bytes:
        return b"[" + b",".join([item] * min(num_bytes // (len(item) + 1) - 1, most)) + b"]"

    def numbered(count: int, value: bytes = b"1") -> bytes:
        return b"{" + b",".join(b'"%d":%s' % (number, value) for number in range(count)) + b"}"

    depth = 100_000
    return {
        "lists": repeated(b"[]"),
        "objects": repeated(b'{"":1}'),
        "names": numbered(num_bytes // 11),
        "biases": numbered(min(many, num_bytes // 11) // 2),
        "texts": repeated(b'"a"', many),
        "numbers": repeated(b"1"),
        "long numbers": repeated(b"123456"),
        "fractions": repeated(b"1.5"),
        "lists of numbers": repeated(b"[" + b",".join([b"1"] * 60) + b"]"),
        "objects for texts": repeated(b"{}", 60_000),
        "text": b'"' + b"a b " * (num_bytes // 4) + b'"',
        "one word": b'"' + b"a" * num_bytes + b'"',
        "escapes": b'"' + b'\\"' * (num_bytes // 2) + b'"',
        "brackets in a text": b'"' + b"[{," * (num_bytes // 3) + b'"',
        "deep lists": b"[" * depth,
        "deep objects": b'{"a":' * depth + b"1" + b"}" * depth,
        "NaN": b"NaN",
        "infinity": b"Infinity",
        "minus infinity": b"-Infinity",
        "beyond doubles": b"1e999",
        "a million": b"1000000",
        "minus one": b"-1",
        "many digits": b"9" * 5_000,
        "list of NaN": b"[" + b",".join([b"NaN"] * 1_000) + b"]",
        "infinities by number": numbered(1_000, b"-Infinity"),
        "no Unicode": b'"\\ud800"',
    }
