"""Tests that tokenizers in GGUF files give the same tokens and texts as the tokenizers that the test trained."""

from __future__ import annotations

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bridle.errors import UnsupportedModel
from bridle.gguf import open_gguf
from bridle.gguf.pretokenizers import PRE_TOKENIZERS, name_of, pre_tokenizer_spec
from bridle.gguf.shards import GgufModel
from bridle.gguf.vocabulary import GgufVocabulary, read_vocabulary
from bridle.gguf.vocabulary_writer import vocabulary_fields
from bridle.model.hub_lookup import resolve_model
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.tokenizer_files import load_fast_tokenizer, read_tokenizer
from bridle.tokenizer.unpacked_vocabulary import read_unpacked_vocabulary
from bridle.tokenizer.vocabulary import Vocabulary
from tests.fakes.tiny_checkpoints import CHAT_TEMPLATE
from tests.gguf.kit import folder, pair

ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
NUM_ROWS = 1_200


def corpus() -> list[str]:
    rng = random.Random(0)
    words = [
        "the",
        "in",
        "an",
        "er",
        "on",
        "there's",
        "I'LL",
        "we've",
        "2024",
        "12345",
        "3,14",
        "na\u00efve",
        "\u00dcn",
    ]
    words += ["\u65e5\u672c\u8a9e", "\ud55c\uad6d\uc5b4", "d\u00e9j\u00e0-vu", "x=y+z;", "{}[]()", "\t\n", "\n\n", "!?"]
    return [" ".join(rng.choices(words, k=12)) for _ in range(400)]


def _written(tokenizer: Any, name: str) -> tuple[tokenizers.Tokenizer, GgufVocabulary]:
    """Write `tokenizer` to a GGUF file; return the tokenizer and vocabulary that are read from the file."""
    from gguf import GGUFWriter

    fields = vocabulary_fields(json.loads(tokenizer.to_str()), ROLES, NUM_ROWS, CHAT_TEMPLATE)
    path = folder() / f"{name}.gguf"
    writer = GGUFWriter(path, "llama")
    fields.put(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    vocabulary = read_vocabulary(GgufModel([open_gguf(path)]))
    return tokenizers.Tokenizer.from_str(json.dumps(vocabulary.spec)), vocabulary


def _finish(tokenizer: Any) -> Any:
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("  <x>", normalized=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def byte_level(name: str) -> Any:
    """Train a byte-level BPE tokenizer with the pre-tokenizer that GGUF calls `name`."""
    rule = PRE_TOKENIZERS[name]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=rule.is_whole))
    spec = json.loads(tokenizer.to_str()) | {"pre_tokenizer": pre_tokenizer_spec(name)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    if rule.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus(), trainer)
    return _finish(tokenizer)


def sentencepiece(prefix: bool) -> Any:
    """Train a BPE tokenizer with byte fallback and no pre-tokenizer, like Gemma's; `prefix` adds Llama 2's leading
    space."""
    pieces = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    lead = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*lead, normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?=\u2581)"), "isolated")  # for training alone
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=900, special_tokens=pieces))
    spec = json.loads(tokenizer.to_str())
    kept = [added for added in spec["added_tokens"] if not added["content"].startswith("<0x")]
    spec |= {"pre_tokenizer": None, "added_tokens": kept}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return _finish(tokenizer)


def unigram() -> Any:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>")
    tokenizer.train_from_iterator(corpus(), trainer)
    return _finish(tokenizer)


NAMES = sorted({name_of(pre_tokenizer_spec(n), r.is_whole, r.is_composed) or n for n, r in PRE_TOKENIZERS.items()})
KINDS = [*NAMES, "spm-prefix", "spm", "unigram"]


@cache
def both(kind: str) -> tuple[Any, Any, GgufVocabulary]:
    makers = {"spm-prefix": lambda: sentencepiece(True), "spm": lambda: sentencepiece(False), "unigram": unigram}
    original = makers[kind]() if kind in makers else byte_level(kind)
    return original, *_written(original, kind)


TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                *" \n\t.,'",
                "the",
                "The",
                "I'll",
                "1234567",
                "é",
                "e\u0301",
                "日本",
                "<s>",
                "<think>",
                "  <x>",
                "\u2581",
                "🙂",
            ]
        ),
        max_size=14,
    ).map("".join),
)


@pytest.mark.few(12)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_become_the_same_tokens_and_back(kind: str) -> None:
    original, copy, _ = both(kind)

    @given(TEXTS)
    def check(text: str) -> None:
        for adds in (False, True):
            want = original.encode(text, add_special_tokens=adds).ids
            assert copy.encode(text, add_special_tokens=adds).ids == want
            for hides in (False, True):
                kept = copy.decode(want, skip_special_tokens=hides)
                assert kept == original.decode(want, skip_special_tokens=hides)

    check()


@pytest.mark.parametrize("kind", ["llama-bpe", "spm", "unigram"])
def test_roles_ends_and_template_are_kept(kind: str) -> None:
    original, copy, vocabulary = both(kind)
    assert vocabulary.roles == ROLES and vocabulary.chat_template == CHAT_TEMPLATE
    ends = {original.token_to_id("</s>"), original.token_to_id("<|im_end|>")}
    assert vocabulary.end_ids[0] == original.token_to_id("</s>") and set(vocabulary.end_ids) == ends
    assert copy.get_vocab_size() <= NUM_ROWS  # rows without a token have none


@pytest.mark.parametrize("kind", ["llama-bpe", "spm"])
def test_marks_behind_a_gap_keep_their_ids(kind: str) -> None:
    """An added token keeps its id after a gap in the ids, although `tokenizers` would renumber it."""
    spec = json.loads(both(kind)[0].to_str())
    spec["model"]["vocab"]["<far>"] = NUM_ROWS - 3
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": NUM_ROWS - 3, "content": "<far>"})
    _, vocabulary = _written(tokenizers.Tokenizer.from_str(json.dumps(spec)), f"far-{kind}")
    (path := folder() / f"far-{kind}").mkdir()
    (path / "tokenizer.json").write_text(json.dumps(vocabulary.spec), encoding="utf-8")
    loaded = Tokenizer.load(path)
    assert loaded.id_of("<far>") == NUM_ROWS - 3 and NUM_ROWS - 3 in loaded.encode("the<far>the")


@pytest.mark.parametrize(
    ("kind", "text", "want", "around"),
    [
        ("gemma4", "the the", ["the", "\u2581the"], ["<bos>"]),
        ("bert", "Thethe in", ["the", "##the", "in"], ["[CLS]", "[SEP]"]),
        ("whitespace", "the  e\nhthet", ["the", "e", "h", "the", "t"], ["<bos>"]),
    ],
)
def test_kinds_that_are_only_read(kind: str, text: str, want: list[str], around: list[str]) -> None:
    """Vocabulary types that bridle does not write are read from files: BPE of Gemma 4, WordPiece of BERT, and
    whitespace BPE."""
    tokens = [*around, "<unk>", "[UNK]", *"the\u2581", "th", "the", "\u2581the", "\u2581in"]
    both("llama-bpe")
    model = _with(
        folder() / "llama-bpe.gguf",
        model=kind,
        pre=kind,
        tokens=tokens,
        merges=["t h", "th e", "\u2581 the"],
        token_type=None,
        bos_token_id=0,
        eos_token_id=len(around) - 1,
        add_bos_token=kind != "gemma4",  # of which it is added all the same
        add_eos_token=kind == "bert",
    )
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(read_vocabulary(model).spec))
    assert tokenizer.encode(text, add_special_tokens=False).tokens == want
    assert tokenizer.encode(text).tokens == [around[0], *want, *around[1:]]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("afmoe", "12|345| |123|456| |漢字|abc|'S|\n\n"),
        ("tiny_aya", "12|345| |123|456| 漢字abc'S|\n\n"),
        ("kimi-k2", "123|45| |123|456| |漢字|abc'S|\n\n"),
        ("superbpe", "12|345| |123|456| 漢字abc'S\n\n"),
        ("youtu", "1|2|3|4|5| |1|2|3|4|5|6| |漢字|abc'S|\n\n"),
    ],
)
def test_texts_are_cut_as_the_names_say(name: str, want: str) -> None:
    spec = json.loads(tokenizers.Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": pre_tokenizer_spec(name)}
    splitter = tokenizers.Tokenizer.from_str(json.dumps(spec)).pre_tokenizer
    text = "12345 123456 漢字abc'S\n\n"
    assert "|".join(text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)) == want


def test_names_mean_one_thing_each() -> None:
    for name in NAMES:
        rule = PRE_TOKENIZERS[name]
        assert name_of(pre_tokenizer_spec(name), rule.is_whole, rule.is_composed) == name
    own = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    assert name_of(own, False, False) == "gpt-2"
    assert name_of({**own, "add_prefix_space": True}, False, False) is None
    assert pre_tokenizer_spec("no such") is None


def _with(path: Path, **changes: Any) -> GgufModel:
    model = GgufModel([open_gguf(path)])
    model.metadata = {**model.metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    return model


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "rwkv"}, "unknown tokenizer model 'rwkv'; known are gpt2, llama, t5"),
        ({"model": None}, "unknown tokenizer model None"),
        ({"pre": "nobody"}, "pre-tokenizer 'nobody' is not known"),
        ({"tokens": []}, "holds no tokens"),
        ({"tokens": ["a"]}, "token types"),
        ({"tokens": 5}, "not a list of strings"),
        ({"merges": ["a b"] * 9}, "merges name unknown tokens"),
        ({"eos_token_id": -5}, "eos_token_id is -5"),
        ({"add_bos_token": 1}, "must be true or false"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused(changes: dict[str, Any], reason: str) -> None:
    both("llama-bpe")
    merges = {"merges": ["\u0120x y"] * 3} if "merges" in changes else {}
    with pytest.raises(UnsupportedModel, match=reason):
        read_vocabulary(_with(folder() / "llama-bpe.gguf", **{**changes, **merges}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "the steps Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer has no name in GGUF files"),
        ({"model": {"type": "WordPiece"}}, "type 'WordPiece'"),
    ],
)
def test_what_cannot_be_written_is_refused(change: dict[str, Any], reason: str) -> None:
    spec = json.loads(both("llama-bpe")[0].to_str()) | change
    with pytest.raises(UnsupportedModel, match=reason):
        vocabulary_fields(spec, ROLES, NUM_ROWS, None)


def test_more_tokens_than_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="the embedding has 20 rows"):
        vocabulary_fields(json.loads(both("llama-bpe")[0].to_str()), ROLES, 20, None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_an_unpacked_tokenizer_is_that_of_the_library(family: str) -> None:
    """The tokenizer of an unpacked file, read without transformers, equals the one that transformers loads."""
    unpacked = resolve_model(str(pair(family)[1]))
    own, loaded = read_tokenizer(unpacked), load_fast_tokenizer(unpacked)
    for text in [*corpus()[:20], "<s>a</s> <|im_start|>b", "", "  \n\n a"]:
        for special in (True, False):
            want = loaded.backend_tokenizer.encode(text, add_special_tokens=special).ids
            assert own.backend.encode(text, add_special_tokens=special).ids == want
    added, others = (tok.get_added_tokens_decoder() for tok in (own.backend, loaded.backend_tokenizer))
    assert {i: (t.content, t.special) for i, t in added.items()} == {
        i: (t.content, t.special) for i, t in others.items()
    }
    assert own.roles.items() <= {role: str(token) for role, token in loaded.special_tokens_map.items()}.items()
    assert own.chat_template == loaded.chat_template


@pytest.mark.few(24)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["the", "<s>"])
def test_a_vocabulary_is_known_without_a_tokenizer(kind: str, role: str, tmp_path: Path) -> None:
    _, copy, vocabulary = both(kind)
    copy = tokenizers.Tokenizer.from_str(copy.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary.spec), encoding="utf-8")
    found = read_unpacked_vocabulary(tmp_path, [role, "no such"])
    if kind == "unigram":
        assert found is None
        return
    assert found is not None and found.table is not None
    if role not in {token.content for token in copy.get_added_tokens_decoder().values()}:
        copy.add_special_tokens([AddedToken(role, normalized=False, special=True)])
    wanted = Vocabulary(copy)
    assert wanted.table is not None
    assert (list(found.pieces), found.gaps, found.added) == (list(wanted.pieces), wanted.gaps, wanted.added)
    assert (found.table.texts, found.table.raw) == (wanted.table.texts, wanted.table.raw)


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    shutil.copy(pair("llama")[1], file)
    first = resolve_model(str(file))

    def fail(path: Path) -> GgufModel:
        raise AssertionError("its header is known")

    monkeypatch.setattr("bridle.gguf.folder.open_model", fail)
    assert resolve_model(str(file)) == first
    os.utime(file, (0, 0))
    with pytest.raises(AssertionError, match="is known"):
        resolve_model(str(file))
    monkeypatch.undo()
    shutil.rmtree(first)
    assert resolve_model(str(file)) == first and (first / "tokenizer.json").is_file(), "the folder was removed"
