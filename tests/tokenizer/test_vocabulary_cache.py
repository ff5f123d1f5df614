"""Tests of a tokenizer with a cached vocabulary: it knows its tokens without reading its files, and works the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridle.aici.runtime.vocabulary import load_vocabulary
from bridle.file_cache import entries
from bridle.model.hub_lookup import resolve_model
from bridle.tokenizer import Tokenizer, tokenizer, vocabulary_cache
from bridle.tokenizer.tokenizer_files import TokenizerFiles, read_tokenizer
from tests.gguf.kit import pair
from tests.tokenizer.kit import MAKERS, SENTENCES

Read = Callable[[Path], TokenizerFiles]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabulary_cache, "LEAST_BYTES", 0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of folders whose tokenizer files are read."""
    found: list[Path] = []

    def read(folder: Path) -> TokenizerFiles:
        found.append(folder)
        return read_tokenizer(folder)

    monkeypatch.setattr(tokenizer, "read_tokenizer", read)
    return found


def folder_of(kind: str, folder: Path) -> Path:
    folder.mkdir()
    MAKERS[kind]().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def is_opened(found: Tokenizer | None) -> bool:
    """Return whether the tokenizer's own files were read."""
    assert found is not None
    return vars(found)["_opened"] is not None


def knowledge(found: Tokenizer) -> Any:
    """Return all properties that are available without tokenizing."""
    ids = range(-1, found.vocab_size + 1)
    table = found.table
    return (
        found.vocab_size,
        [found.token_bytes(token) for token in ids],
        found.special_token_ids,
        (found.eos_token_ids, found.bos_token_id, found.id_of("</s>")),
        found.added_tokens,
        (found.without_token(10_000), found.beyond(5)),
        found.template_text,
        None if table is None else ([table.first_bytes(token) for token in ids], table.initial_lead),
    )


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "unigram"])
def test_a_cached_vocabulary_is_the_same_tokenizer(kind: str, tmp_path: Path, reads: list[Path]) -> None:
    folder = folder_of(kind, tmp_path / "model")
    first, again = Tokenizer.load(folder), Tokenizer.load(folder)
    assert reads == [folder]
    assert knowledge(again) == knowledge(first)
    for text in SENTENCES:
        tokens = first.encode(text)
        assert again.encode(text) == tokens
        assert again.decode(tokens) == first.decode(tokens)
    assert again.first_difference(first) is None


@pytest.mark.parametrize("kind", ["byte_level", "gemma_like"])
def test_tokens_are_known_without_reading_the_tokenizer(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    first, again = Tokenizer.load(folder), Tokenizer.load(folder)
    assert knowledge(again) == knowledge(first)
    assert again.decode(first.encode(SENTENCES[0])) == first.decode(first.encode(SENTENCES[0]))
    assert not is_opened(again)
    assert again.id_of("no such token") is None
    assert is_opened(again)


def test_the_scores_of_a_unigram_model_are_not_rounded_by_a_cache(tmp_path: Path, reads: list[Path]) -> None:
    folder = folder_of("unigram", tmp_path / "model")
    Tokenizer.load(folder)
    Tokenizer.load(folder)
    assert reads == [folder, folder]


@pytest.mark.parametrize("change", ["vocabulary", "template", "entry"])
def test_what_has_changed_is_read_again(change: str, tmp_path: Path, reads: list[Path]) -> None:
    folder = folder_of("byte_level", tmp_path / "model")
    wanted = knowledge(Tokenizer.load(folder))
    if change == "vocabulary":
        MAKERS["words"]().save(str(folder / "tokenizer.json"))
    elif change == "template":
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    else:
        (entry,) = [each.path for each in entries() if each.path.parent.name == "vocabularies"]
        data = bytearray(entry.read_bytes())
        data[-3] ^= 1
        entry.write_bytes(data)
    found = knowledge(Tokenizer.load(folder))
    assert reads == [folder, folder]
    assert (found == wanted) == (change == "entry")


def test_guests_get_the_same_tokens(tmp_path: Path) -> None:
    folder = folder_of("byte_fallback", tmp_path / "model")
    first, again = load_vocabulary(str(folder)), load_vocabulary(str(folder))
    assert not is_opened(again.tokenizer)
    assert (again.tokens, again.eos, again.special) == (first.tokens, first.eos, first.special)
    again.prepare()
    assert is_opened(again.tokenizer)
    assert [again.encode(text) for text in SENTENCES] == [first.encode(text) for text in SENTENCES]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_an_unpacked_file_is_known_before_its_tokenizer_is_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model(str(pair(family)[1]))
    found, guests = Tokenizer.load(folder), load_vocabulary(str(folder))
    assert not is_opened(found)
    assert not is_opened(guests.tokenizer)
    monkeypatch.setattr(vocabulary_cache, "LEAST_BYTES", 1 << 30)
    wanted, whole = Tokenizer.load(folder), load_vocabulary(str(folder))
    assert knowledge(found) == knowledge(wanted)
    assert (guests.tokens, guests.eos, guests.special) == (whole.tokens, whole.eos, whole.special)
    for text in SENTENCES:
        assert found.encode(text) == wanted.encode(text)
        assert guests.encode(text) == whole.encode(text)
