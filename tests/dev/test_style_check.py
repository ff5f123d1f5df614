"""Tests of the style check `scripts/style_check.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import style_check

WORDS = " ".join(["word"] * 20)


def checked(folder: Path, **files: str) -> list[str]:
    """Return the errors of files, whose keys are their paths with `__` for `/` and `_DOT_` for a dot."""
    paths = [name.replace("__", "/").replace("_DOT_", ".") for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return style_check.check(folder, paths)


def test_a_banned_phrase_is_found_in_pages_docstrings_and_messages(tmp_path: Path) -> None:
    errors = checked(
        tmp_path,
        docs__a_DOT_md="Fine.\n\nIt takes so many tokens.\n",
        bridle__b_DOT_py='"""Closed by whoever\nopened it."""\n\nERROR = f"{1} is a model that is none"\n',
        tests__c_DOT_py='"""Tests."""\n\nREPLY = "whoever is asked"\n',
    )
    places = [error.split(": ")[0] for error in errors]
    assert places == ["docs/a.md:3", "bridle/b.py:1", "bridle/b.py:4"]
    assert "(give the number or its name)" in errors[0]


@pytest.mark.parametrize(
    "text", ["`so many`", "```\nso many\n```", "calls are told apart", "as soon as it is sent", "as it is written"]
)
def test_code_and_other_meanings_are_no_errors(tmp_path: Path, text: str) -> None:
    assert checked(tmp_path, a_DOT_md=text) == []


def test_question_words_are_errors_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"dev__a_DOT_py": '"""Whether it is."""', "dev__b_DOT_py": '"""However."""'}
    assert checked(tmp_path, **files) == []
    monkeypatch.setattr(style_check, "MAX_QUESTIONS", 0)
    assert checked(tmp_path, **files) == ["dev/a.py:1: docstring starts with a question word"]


def test_long_sentences_are_errors(tmp_path: Path) -> None:
    text = f"A {WORDS}. A {WORDS}.\n\n* A {WORDS}\n* A {WORDS}\n\nA {WORDS} {WORDS}.\n"
    (error,) = checked(tmp_path, a_DOT_md=text)
    assert error.startswith("a.md:1: 41 words, at most 30: A word")


@pytest.mark.parametrize(
    "text",
    [
        f"Run it.\n\n    Parameters\n    ----------\n    name\n        A {WORDS}\n    other\n        A {WORDS}\n    ",
        f"Run it so\n\n        {WORDS}\n        {WORDS}\n\n    and so on.",
        f"Run it {WORDS}\n\n    >>> {WORDS}\n    {WORDS}\n\nand so on.",
        f"A {WORDS}. llama.cpp {WORDS}",
        f"(A {WORDS}.) A {WORDS}",
    ],
)
def test_parts_of_a_docstring_are_no_single_sentence(tmp_path: Path, text: str) -> None:
    assert checked(tmp_path, dev__a_DOT_py=f'''"""{text}"""''') == []


def test_a_list_of_names_with_their_systems_is_no_sentence(tmp_path: Path) -> None:
    text = ", ".join(["`name` (vLLM, SGLang, llama.cpp)"] * 20)
    assert checked(tmp_path, a_DOT_md=text) == []
