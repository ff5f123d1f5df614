"""Tests of mask rows: they have exact values in every type, and can be converted back to bits."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.aici.masks import DTYPES, MaskLayout, MaskReader, MaskWriter, dense_table, fill_row
from bridle.errors import ProtocolError

SIZE = 1 << 20


def bits_of(tokens: set[int], vocab_size: int) -> bytes:
    row = bytearray(4 * ((vocab_size + 31) // 32))
    for token in tokens:
        row[token >> 3] |= 1 << (token & 7)
    return bytes(row)


def test_the_numbers_of_the_specification() -> None:
    layout = MaskLayout.of("f32", 32003, 64 << 20)
    assert (layout.row_elements, layout.row_bytes, layout.num_rows, layout.first_row) == (32960, 131840, 508, 2096)
    assert MaskLayout.of("bool", 32003, 64 << 20).row_bytes == 4 * (32960 + 31) // 32


def test_the_header_names_the_version_and_each_rows_owner() -> None:
    region = bytearray(SIZE)
    layout = MaskLayout.of("f16", 100, SIZE)
    writer = MaskWriter(region, layout)
    writer.write(bits_of({1}, 100), 77)
    assert struct.unpack_from("<4I", region) == (0xF01291B7, 2 * 1088, layout.num_rows, 2)
    assert struct.unpack_from("<2I", region, 64) == (77, 0xFFFFFFFF)
    writer.release()
    assert struct.unpack_from("<I", region, 64) == (0xFFFFFFFF,)
    assert writer.num_free == layout.num_rows


@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 300).flatmap(lambda v: st.tuples(st.just(v), st.lists(st.sets(st.integers(0, v - 1)), max_size=4))),
)
def test_rows_read_back_as_written(dtype: str, drawn: tuple[int, list[set[int]]]) -> None:
    vocab_size, rows = drawn
    region = bytearray(b"\xa5" * SIZE)
    layout = MaskLayout.of(dtype, vocab_size, SIZE)
    writer = MaskWriter(region, layout)
    reader = MaskReader(region)
    for tokens in rows:
        bits = bits_of(tokens, vocab_size)
        noisy = bytearray(bits)
        noisy[-1] |= 0 if vocab_size % 32 > 24 or vocab_size % 32 == 0 else 0x80  # beyond the vocabulary
        row = writer.write(bytes(noisy), 5)
        read = reader.bits(layout.first_row, layout.row_bytes, row, dtype, vocab_size)
        assert read[: vocab_size // 8] == bits[: vocab_size // 8]
        assert {t for t in range(vocab_size) if read[t >> 3] >> (t & 7) & 1} == tokens
        _check_values(bytes(reader.row(layout.first_row, layout.row_bytes, row)), layout, tokens)


def _check_values(raw: bytes, layout: MaskLayout, tokens: set[int]) -> None:
    """Check every element of the row, including padding, against the definition of its type."""
    if layout.dtype == "bool":
        set_bits = {i for i in range(8 * len(raw)) if raw[i >> 3] >> (i & 7) & 1}
        assert set_bits == tokens
        return
    patterns = {"f32": ("<u4", 0xFF800000), "f16": ("<u2", 0xFC00), "bf16": ("<u2", 0xFF80)}
    kind, forbidden = patterns[layout.dtype]
    values = np.frombuffer(raw, kind)
    assert len(values) == layout.row_elements
    assert set(np.flatnonzero(values == 0)) == tokens
    assert np.count_nonzero(values == forbidden) == layout.row_elements - len(tokens)


def test_dense_rows_of_the_first_dialect() -> None:
    region = bytearray(4 * 11)
    fill_row(memoryview(region), np.frombuffer(bits_of({0, 10}, 11), np.uint8), 11, dense_table())
    assert np.frombuffer(region, "<f4").tolist() == [0.0] + [-100.0] * 9 + [0.0]


def test_rows_outside_the_region_are_refused() -> None:
    reader = MaskReader(bytearray(1000))
    for first, stride, index in ((0, 600, 1), (-1, 10, 0), (0, 10, -1), (2000, 1, 0)):
        with pytest.raises(ProtocolError, match="outside"):
            reader.row(first, stride, index)
    with pytest.raises(ProtocolError, match="no room"):
        MaskLayout.of("f32", 32000, 1000)
    with pytest.raises(ProtocolError, match="f64"):
        MaskLayout.of("f64", 32000, SIZE)
