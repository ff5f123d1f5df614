"""Command line flags accept numbers with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.cli.units import parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("32k", 32_000), ("25.6k", 25_600), ("32Ki", 32_768), ("1M", 10**6), (" 7 ", 7)],
)
def test_a_count_may_have_a_unit(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("512MiB", 512 << 20), ("2GiB", 2 << 30), ("2G", 2 * 10**9), ("1.5gib", 3 << 29), ("100B", 100)],
)
def test_a_size_may_have_a_unit(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1e9", "1.5", "2GB2", "nan", "9" * 20, "1i", "0x10"])
def test_a_count_that_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a number|whole number|unknown unit"):
        parse_count(text)


def test_counts_have_no_bytes() -> None:
    with pytest.raises(ValueError, match="'2GiB' is not a number such as 4096 or 32k"):
        parse_count("2GiB")


@given(st.integers(0, 10**12))
def test_plain_numbers_are_themselves(value: int) -> None:
    assert parse_count(str(value)) == parse_bytes(f"{value}B") == value
