"""Tests that llama.cpp's own vocabulary files give the tokens that llama.cpp expects for its test texts.

`BRIDLE_LLAMACPP_VOCABULARIES` names the folder `models` of llama.cpp's sources, which has these files."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from bridle.gguf import open_gguf
from bridle.gguf.shards import GgufModel
from bridle.gguf.vocabulary import read_vocabulary

FOLDER = Path(os.environ.get("BRIDLE_LLAMACPP_VOCABULARIES", os.devnull))
FILES = sorted(FOLDER.glob("ggml-vocab-*.gguf.inp"))


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="BRIDLE_LLAMACPP_VOCABULARIES names no folder with vocabularies")
@pytest.mark.parametrize("texts", FILES, ids=lambda path: path.name.split(".")[0].removeprefix("ggml-vocab-"))
def test_texts_become_the_tokens_of_llamacpp(texts: Path) -> None:
    vocabulary = read_vocabulary(GgufModel([open_gguf(texts.with_suffix(""))]))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(vocabulary.spec))
    parts = texts.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    wanted = [[int(token) for token in line.split()] for line in texts.with_suffix(".out").read_text().split("\n")]
    assert len(parts) > 20
    for text, want in zip(parts, wanted, strict=False):
        if vocabulary.spec["normalizer"] == {"type": "NFC"} and unicodedata.normalize("NFC", text) != text:
            continue  # llama.cpp composes no characters, as the model's own tokenizer does
        assert tokenizer.encode(text, add_special_tokens=False).ids == want, text
