"""Tests of the tokenizer: encoding, decoding, the bytes of tokens, and loading from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.token_table import Spelling
from tests.tokenizer.kit import MAKERS, SENTENCES, WITH_TABLE, backend, make


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_the_right_kinds_have_a_table(kind: str) -> None:
    assert (make(kind).table is not None) == (kind in WITH_TABLE)


@pytest.mark.few(6)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", sorted(MAKERS))
@given(data=st.data())
def test_decode_agrees_with_the_library(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer, twin = make(kind), backend(kind)
    ids = st.integers(0, tokenizer.vocab_size - 1)
    if "fallback" in kind or "gemma" in kind:
        ids = ids.filter(lambda t: not 4 <= t < 260)  # wrong bytes: see the next test
    tokens = data.draw(st.lists(ids, max_size=20))
    assert tokenizer.decode(tokens, skip) == twin.decode(tokens, skip_special_tokens=skip)


def test_a_wrong_byte_does_not_cost_the_right_ones_around_it() -> None:
    tokenizer = make("gemma_like")
    good = tokenizer.encode("é", add_special_tokens=False)
    bad = [tokenizer.encode("😀", add_special_tokens=False)[0]]
    assert tokenizer.decode(good + bad + good) == "é\ufffdé"


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("text", SENTENCES[:4])
def test_encode_is_the_librarys(kind: str, text: str) -> None:
    tokens = make(kind).encode(text, add_special_tokens=False)
    assert tokens == backend(kind).encode(text, add_special_tokens=False).ids
    assert make(kind).encode(text) == [make(kind).bos_token_id, *tokens]


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_bytes_of_tokens_add_up_to_the_text(kind: str) -> None:
    tokenizer = make(kind)
    tokens = tokenizer.encode("the dog sleeps", add_special_tokens=False)
    spelled = b"".join(tokenizer.token_bytes(token) for token in tokens).decode()
    assert spelled.strip() == tokenizer.decode(tokens) == "the dog sleeps"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_byte_level_bytes_are_exact() -> None:
    tokenizer = make("byte_level")
    text = SENTENCES[2]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()
    first = tokenizer.encode("中", add_special_tokens=False)[0]
    assert tokenizer.token_text(first) == "\ufffd"
    (added,) = tokenizer.encode("two words é", add_special_tokens=False)
    assert tokenizer.token_text(added) == "two words é"
    assert tokenizer.decode([added]) == "two words é"


def test_special_and_end_tokens() -> None:
    tokenizer = make("byte_level")
    ids = [tokenizer.encode(name, add_special_tokens=False)[0] for name in ("<s>", "</s>", "<|sys|>")]
    assert tokenizer.special_token_ids == set(ids)
    assert tokenizer.bos_token_id == ids[0]
    assert tokenizer.eos_token_ids == (ids[1], ids[0])  # the tokenizer's own, then the configured one


def test_truncation_and_padding_of_the_file_are_off() -> None:
    raw = MAKERS["byte_level"]()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    text = "the dog sleeps and the fox jumps"
    tokenizer = Tokenizer(raw)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        make("byte_level").encode("a\ud800b")


# -- decoders that are not tables ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC", "pad_token": "<pad>"},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "stop": 1}]},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "ByteLevel"}]},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}],
        },
    ],
)
def test_decoders_that_depend_on_neighbours_are_recognized(spec: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Spelling(spec)


def test_a_table_that_disagrees_with_the_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spelling, "spell", lambda self, piece, is_first=False: piece.upper().encode())
    tokenizer = Tokenizer(MAKERS["gemma_like"]())
    assert tokenizer.table is None
    assert tokenizer.decode(tokenizer.encode("the dog")) == "the dog"


# -- loading -------------------------------------------------------------------------------------------------


def save(folder: Path, **config: Any) -> Path:
    MAKERS["byte_level"]().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_has_the_special_tokens_and_the_template(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1, true, "x"]}')
    tokenizer = Tokenizer.load(save(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}"))
    assert tokenizer.eos_token_ids == (1, 2)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.chat_template.is_present
    message = {"role": "user", "content": "the dog"}
    assert tokenizer.encode_chat([message]) == [0, *tokenizer.encode("the dog", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode(SENTENCES[2])) == SENTENCES[2]


def test_end_tokens_fall_back_to_the_models_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 5}')
    assert Tokenizer.load(save(tmp_path)).eos_token_ids == (1, 5)


def test_a_folder_without_a_tokenizer_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no tokenizer that can be loaded"):
        Tokenizer.load(tmp_path)


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "generation_config.json").write_text("{oops")
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json is not JSON"):
        Tokenizer.load(tmp_path)


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}})
    )
    with pytest.raises(UnsupportedModel):
        Tokenizer.load(tmp_path)
    assert not marker.exists()
