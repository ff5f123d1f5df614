"""Tiny tokenizers of every kind, trained in the test process from a few sentences."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bridle.tokenizer import Tokenizer as BridleTokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "  two spaces, a\ttab and\na line; numbers 1234567890 (in brackets)!",
    "Grüße aus Köln – naïve café, ¿qué tal? 你好世界 привет мир 😀👍🏽",
    "it's what they've said: don't do that. isn't it?",
] * 3
SPECIAL = ["<s>", "</s>", "<|sys|>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words é", special=False)])
    return tokenizer


def byte_fallback(strip: int = 1) -> Tokenizer:
    """Return a tokenizer with byte fallback, as in Llama 2 (`strip` 1) and Gemma (`strip` 0)."""
    trained = Tokenizer(models.BPE())
    steps = [normalizers.Prepend("▁")] if strip else []
    trained.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ascii_only = ["".join(c for c in s if ord(c) < 128) for s in SENTENCES]
    trained.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    import json

    spec = json.loads(trained.to_str())["model"]
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *SPECIAL, *BYTE_TOKENS])}
    for piece in spec["vocab"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [tuple(merge) for merge in spec["merges"]]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = trained.normalizer
    stages: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, *([decoders.Strip(" ", strip, 0)] if strip else [])])
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def gemma_like() -> Tokenizer:
    return byte_fallback(strip=0)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def suffix_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, end_of_word_suffix="</w>", special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def words() -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["<unk>", *SPECIAL, "the", "dog", "sleeps", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker for maker in (byte_level, byte_fallback, gemma_like, unigram, word_piece, suffix_bpe, words)
}
WITH_TABLE = ("byte_level", "byte_fallback", "gemma_like", "unigram")
WITHOUT_TABLE = ("word_piece", "suffix_bpe", "words")


@cache
def make(kind: str) -> BridleTokenizer:
    """Return the tokenizer of the given kind, which adds a beginning-of-text token to prompts."""
    backend = MAKERS[kind]()
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return BridleTokenizer(
        backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, name=kind, eos_token_ids=[bos]
    )


@cache
def backend(kind: str) -> Tokenizer:
    """Return the Hugging Face tokenizer with the same vocabulary, for comparison."""
    twin = Tokenizer.from_str(make(kind)._backend.to_str())
    assert twin.get_vocab() == make(kind)._backend.get_vocab()  # scores may lose their last digit on the way
    return twin
