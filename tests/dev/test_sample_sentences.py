"""Tests of the sampled sentences of `dev/sample_sentences.py`."""

from __future__ import annotations

import ast

from dev.sample_sentences import commits, help_of, messages_of, sample, sentences_of

SOURCE = """
class Options:
    port: int = 0
    "Port to listen on."

def run(path):
    log.info("reading %s from disk", path)
    raise ValueError(f"{path} is not a file: {path}", "path")
"""


def test_texts_of_a_source() -> None:
    tree = ast.parse(SOURCE)
    assert sorted(messages_of(tree)) == ["... is not a file: ...", "reading %s from disk"]
    assert list(help_of(tree)) == ["Port to listen on."]


def test_sentences_have_words_and_no_code() -> None:
    text = "# A page of text here\n\nOne sentence with words.\nShort.\n```\na b c d e f\n```\nMore than three words."
    assert list(sentences_of(text)) == ["A page of text here", "One sentence with words.", "More than three words."]


def test_a_seed_repeats_and_kinds_have_equal_shares() -> None:
    kinds = {"page": [f"p{i}" for i in range(50)], "commit": [f"c{i}" for i in range(50)]}
    first = sample(kinds, 1, 10)
    assert first == sample(kinds, 1, 10) != sample(kinds, 2, 10)
    assert [each.split("]")[0] for each in first] == ["[page"] * 5 + ["[commit"] * 5


def test_commit_messages_are_found_without_a_tag() -> None:
    assert commits()
