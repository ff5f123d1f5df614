"""The survey of transformers' architectures tries each in its own process, and writes the results to a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bridle.bench.settings import BenchSettings
from bridle.errors import InvalidRequest
from dev.bench import families


@pytest.mark.slow
def test_states_and_causes(tmp_path: Path) -> None:
    names = ("llama/causal", "mllama/multimodal", "granite_docling/multimodal")
    results = {name: list(families._try_apart(*name.split("/"))) for name in names}
    assert [state for state, _ in results.values()] == ["served", "refused", "served"]
    rows = families.table_rows(results)
    assert rows == [
        ("served", "2", "`granite_docling*`, `llama`"),
        ("refused: cross attention to images", "1", "`mllama*`"),
    ]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- families -->\nold\n<!-- end of families -->\nafter\n")
    families.write_table(page, rows)
    text = page.read_text()
    assert "| served | 2 | `granite_docling*`, `llama` |" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")


@pytest.mark.parametrize("part", [{"quick": True}, {"parts": ("llama",)}])
def test_a_part_of_the_survey_is_not_reported_as_all(part: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("untouched")
    with pytest.raises(InvalidRequest, match="needs all architectures") as caught:
        families.measure(BenchSettings(report=page, **part), Mock(), Mock())
    assert caught.value.param == "report" and page.read_text() == "untouched"
