"""Tests of added tokens: they have the ids that their files state, or the folder is refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bridle.aici.runtime.vocabulary import load_vocabulary
from bridle.errors import UnsupportedModel
from bridle.model.added_tokens import refuse_renumbered
from bridle.model.quality import read_tokens
from bridle.tokenizer import Tokenizer

LETTERS = {letter: number for number, letter in enumerate("abcdefgh")}


def spec(added: Sequence[tuple[str, int]], vocabulary: Mapping[str, int] = LETTERS) -> dict[str, Any]:
    """Return the content of a `tokenizer.json` with letters, and added tokens with the given ids."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model = {"type": "BPE", "dropout": None, **plain, "fuse_unk": False, "byte_fallback": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": content, **flags} for content, token in added],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {**model, "vocab": dict(vocabulary), "merges": []},
    }


def write(folder: Path, tokenizer: Mapping[str, Any], configured: Sequence[tuple[str, int]] = ()) -> Path:
    decoder = {str(token): {"content": content, "special": True} for content, token in configured}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"added_tokens_decoder": decoder} if decoder else {})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


LOADERS: dict[str, Callable[[Path], object]] = {
    "engine": Tokenizer.load,
    "control runtime": lambda folder: load_vocabulary(str(folder)),
    "quality": lambda folder: read_tokens(folder, "abcdefgh"),
}


@pytest.mark.parametrize("loader", sorted(LOADERS))
def test_a_token_behind_a_gap_is_refused_with_both_ids(loader: str, tmp_path: Path) -> None:
    write(tmp_path, spec([("<x>", 8), ("<y>", 20)]))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json gives .*'<y>' the id 20, but it is loaded as 9\."):
        LOADERS[loader](tmp_path)


@pytest.mark.parametrize("loader", sorted(LOADERS))
def test_tokens_that_follow_the_vocabulary_are_loaded(loader: str, tmp_path: Path) -> None:
    assert LOADERS[loader](write(tmp_path, spec([("<x>", 8), ("<y>", 9)])))


def test_a_gap_is_loaded_where_the_vocabulary_has_the_token_with_its_id(tmp_path: Path) -> None:
    """A vocabulary with the token's id is loaded, as the error advises. GGUF files become such a file."""
    folder = write(tmp_path, spec([("<y>", 20)], LETTERS | {"<y>": 20}))
    assert Tokenizer.load(folder).encode("a<y>b") == [0, 20, 1]
    filled = [(f"<unused {token}>", token) for token in range(8, 20)]
    assert Tokenizer.load(write(tmp_path, spec([*filled, ("<y>", 20)]))).encode("a<y>b") == [0, 20, 1]


def test_a_configuration_that_adds_a_token_behind_a_gap_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, spec([("<x>", 8)]), configured=[("<x>", 8), ("<y>", 20)])
    with pytest.raises(UnsupportedModel, match=r"tokenizer_config\.json gives .*'<y>' the id 20, .* loaded as 9"):
        Tokenizer.load(folder)


def test_a_configuration_counts_for_nothing_where_the_token_is_known_without_it(tmp_path: Path) -> None:
    folder = write(tmp_path, spec([("<x>", 8)]), configured=[("<x>", 30), ("a", 31), ("<y>", 9)])
    assert Tokenizer.load(folder).encode("a<x><y>") == [0, 8, 9]


IDS = st.integers(0, 14)
ADDED = st.lists(st.tuples(st.sampled_from(["<x>", "<y>", "<z>", "a", ""]), IDS), max_size=4)
VOCABULARIES = st.lists(IDS, min_size=8, max_size=8, unique=True).map(
    lambda ids: dict(zip(LETTERS, sorted(ids), strict=True))
)


@given(added=ADDED, vocabulary=st.one_of(st.just(LETTERS), VOCABULARIES))
def test_what_is_not_refused_reads_each_token_as_stated(
    added: list[tuple[str, int]], vocabulary: dict[str, int]
) -> None:
    """The ids have arbitrary gaps and clashes. A loaded folder reads each added token as its stated id."""
    made = spec(added, vocabulary)
    backend = tokenizers.Tokenizer.from_str(json.dumps(made))
    found = {content: backend.encode(content).ids for content, _ in added if content}
    as_stated = all(found[content] == [token] for content, token in added if content)
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), made)
        if as_stated:
            refuse_renumbered(folder, backend)
        else:
            with pytest.raises(UnsupportedModel, match=r"tokenizer\.json gives the added token"):
                refuse_renumbered(folder, backend)
