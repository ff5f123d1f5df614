"""The benchmark of schemas distinguishes served schemas from refused ones, and right texts from wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridle.errors import InvalidRequest
from bridle.structured_output import ConstraintLimits
from dev.bench.constraints import made_up_vocabulary
from dev.bench.schemas import Judge, collections, files_in, reason_of, reasons, times

WORD = {"type": "string", "maxLength": 3}
FILES = {
    "Easy---1.json": (WORD, [("ab", True), ("abcd", False)]),
    "Easy---2.json": ({"type": "string", "not": {"enum": ["a"]}}, [("b", True), ("a", False)]),
    "Hard_set_3.json": ({"type": "array", "uniqueItems": True}, [([1], True)]),
    # What a file calls valid and is not, and the other way round: the figures say that too.
    "Hard_set_4.json": (WORD, [("abcd", True), ("ab", False)]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (schema, tests) in FILES.items():
        content = {"schema": schema, "tests": [{"data": data, "valid": is_valid} for data, is_valid in tests]}
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_schemas_and_texts_are_told_apart(folder: Path) -> None:
    judge = Judge(made_up_vocabulary(3000), ConstraintLimits(seconds=10))
    verdicts = [judge.look_at(path) for path in files_in(folder, quick=False)]
    judge.close()
    assert [verdict.outcome for verdict in verdicts] == ["as it is", "in other words", "refused", "as it is"]
    assert [verdict.wrong for verdict in verdicts] == [[], [], [], ["Hard_set_4.json 1"]]
    easy, hard, all_of_them = collections(verdicts)
    assert (easy["collection"], easy["schemas"], easy["valid, right"], easy["not valid, right"]) == ("Easy", 2, 2, 2)
    assert (hard["collection"], hard["refused"], hard["valid, right"], hard["not valid, right"]) == ("Hard", 1, 0, 0)
    assert all_of_them["served"] == "75.0%"
    assert reasons(verdicts) == [
        {"reason": "`not`", "refused": 1, "served in other words": 1},
        {"reason": "`uniqueItems`", "refused": 1, "served in other words": 0},
    ]
    assert [row["times"] for row in times(verdicts)] == [3, sum(len(verdict.masks) for verdict in verdicts)]


def test_reasons_are_told_without_names() -> None:
    assert reason_of('Unimplemented keys: ["then", "if"]') == "`if`"
    assert reason_of("Unknown format: tea") == reason_of("Unknown format: topic") == "`format`"
    assert reason_of("something else about 'x'") == "other forms"


def test_a_folder_is_needed(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(InvalidRequest, match="MaskBench"):
            files_in(folder, quick=True)


def test_some_files_are_always_the_same_ones(folder: Path) -> None:
    assert files_in(folder, quick=True) == files_in(folder, quick=True)
    assert len(files_in(folder, quick=True)) == 1
