"""Converts a `tokenizer.json` to metadata of a GGUF file; `bridle.gguf.vocabulary` does the reverse."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from bridle.errors import UnsupportedModel
from bridle.gguf.pretokenizers import name_of
from bridle.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(slots=True)
class VocabularyFields:
    """The tokenizer fields of a file's metadata."""

    kind: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    charsmap: bytes = b""
    chat_template: str | None = None

    def put(self, writer: Any) -> None:
        """Add the fields to a `gguf.GGUFWriter`."""
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        for role, token in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
        for name, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        if self.charsmap:
            writer.add_precompiled_charsmap(self.charsmap)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def vocabulary_fields(
    spec: Mapping[str, Any], roles: Mapping[str, str], num_rows: int, chat_template: str | None
) -> VocabularyFields:
    """Return the fields that describe the tokenizer `spec`, for an embedding of `num_rows` rows. Raises
    `UnsupportedModel` for a tokenizer that a file cannot describe."""
    model = spec["model"]
    if model.get("type") == "Unigram":
        fields = _unigram(spec)
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        fields = _sentencepiece(spec)
    elif model.get("type") == "BPE":
        fields = _byte_level(spec)
    else:
        raise UnsupportedModel(f"a tokenizer of type {model.get('type')!r} cannot be written to a GGUF file")
    _add_marks(fields, spec, roles)
    _pad(fields, num_rows)
    fields.chat_template = chat_template
    _say_around(fields, spec)
    return fields


def _byte_level(spec: Mapping[str, Any]) -> VocabularyFields:
    model = spec["model"]
    is_composed = _is_composed(spec.get("normalizer"))
    pre = name_of(spec.get("pre_tokenizer"), bool(model.get("ignore_merges")), is_composed)
    if pre is None:
        raise UnsupportedModel("the tokenizer's pre-tokenizer has no name in GGUF files")
    tokens = _by_id(model["vocab"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return VocabularyFields("gpt2", pre, tokens, [NORMAL] * len(tokens), merges=merges)


def _is_composed(normalizer: Mapping[str, Any] | None) -> bool:
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    if kinds not in ([], ["NFC"]):
        raise UnsupportedModel(
            f"the tokenizer has the steps {', '.join(map(str, kinds))}; GGUF files cannot store these"
        )
    return bool(kinds)


def _sentencepiece(spec: Mapping[str, Any]) -> VocabularyFields:
    model = spec["model"]
    tokens = _by_id(model["vocab"])
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    fields = VocabularyFields("llama", "default", tokens, [_kind_of(text, model) for text in tokens])
    fields.scores = [-float(ranks.get(text, len(ranks) + token)) for token, text in enumerate(tokens)]
    fields.flags["add_space_prefix"] = _has_prefix(spec)
    return fields


def _has_prefix(spec: Mapping[str, Any]) -> bool:
    """Return whether a space is prepended to a text. Raises `UnsupportedModel` for normalizers other than
    SentencePiece's usual ones, because files cannot describe them."""
    normalizer, splitter = spec.get("normalizer") or {}, spec.get("pre_tokenizer") or {}
    steps = [step.get("type") for step in normalizer.get("normalizers", [normalizer] if normalizer else [])]
    if splitter.get("type") == "Metaspace" and not steps:
        return bool(splitter.get("prepend_scheme", "always") != "never")
    is_split = splitter.get("type") not in (None, "Split")
    if is_split or steps not in (["Prepend", "Replace"], ["Replace"]):
        raise UnsupportedModel(
            f"the tokenizer normalizes with {', '.join(map(str, steps))}; GGUF files cannot store this"
        )
    return bool(steps[0] == "Prepend")


def _unigram(spec: Mapping[str, Any]) -> VocabularyFields:
    model = spec["model"]
    tokens = [str(text) for text, _ in model["vocab"]]
    fields = VocabularyFields("t5", "default", tokens, [_kind_of(text, model) for text in tokens])
    fields.scores = [float(score) for _, score in model["vocab"]]
    if model.get("unk_id") is not None:
        fields.kinds[model["unk_id"]] = UNKNOWN
        fields.ids["unknown"] = model["unk_id"]
    splitter = spec.get("pre_tokenizer") or {}
    if splitter.get("type") != "Metaspace":
        raise UnsupportedModel("a unigram tokenizer without Metaspace cannot be written to a GGUF file")
    fields.flags["add_space_prefix"] = splitter.get("prepend_scheme", "always") != "never"
    normalizer = spec.get("normalizer") or {}
    for step in normalizer.get("normalizers", [normalizer] if normalizer else []):
        if step.get("type") != "Precompiled":
            raise UnsupportedModel(f"the tokenizer normalizes with {step.get('type')}; GGUF files cannot store this")
        fields.charsmap = base64.b64decode(step["precompiled_charsmap"])
    return fields


def _kind_of(text: str, model: Mapping[str, Any]) -> int:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">") and model.get("byte_fallback"):
        return BYTE
    return UNKNOWN if text == model.get("unk_token") else NORMAL


def _by_id(vocabulary: Mapping[str, int]) -> list[str]:
    tokens = [""] * (1 + max(vocabulary.values()))
    for text, token in vocabulary.items():
        tokens[token] = text
    return tokens


def _add_marks(fields: VocabularyFields, spec: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    """Add the tokens of `added_tokens` with their kinds, and the special tokens by role."""
    for added in spec.get("added_tokens", []):
        token, text = added["id"], added["content"]
        while len(fields.tokens) <= token:
            fields.tokens.append("")
            fields.kinds.append(UNUSED)
        fields.tokens[token] = text
        if fields.kinds[token] != UNKNOWN or fields.kind == "gpt2":
            fields.kinds[token] = CONTROL if added.get("special") else USER_DEFINED
    numbers = {text: token for token, text in enumerate(fields.tokens)}
    for name, role in _ROLES.items():
        if roles.get(name) in numbers:
            fields.ids[role] = numbers[roles[name]]


def _pad(fields: VocabularyFields, num_rows: int) -> None:
    if len(fields.tokens) > num_rows:
        raise UnsupportedModel(f"the tokenizer has {len(fields.tokens)} tokens, but the embedding has {num_rows} rows")
    for token in range(num_rows):
        if token >= len(fields.tokens):
            fields.tokens.append("")
            fields.kinds.append(UNUSED)
        if not fields.tokens[token] and fields.kinds[token] in (NORMAL, UNUSED):
            fields.tokens[token], fields.kinds[token] = f"[PAD{token}]", UNUSED
    if fields.scores:
        fields.scores += [-1e6] * (num_rows - len(fields.scores))


def _say_around(fields: VocabularyFields, spec: Mapping[str, Any]) -> None:
    """Find out whether the tokenizer adds BOS and EOS tokens around a text, by tokenizing one, and write the result."""
    around = tokenizers.Tokenizer.from_str(json.dumps(spec)).encode("", add_special_tokens=True).ids
    begins = bool(around) and around[0] == fields.ids.get("bos")
    ends = bool(around) and around[-1] == fields.ids.get("eos") and len(around) > begins
    if len(around) != begins + ends:
        raise UnsupportedModel(f"the tokenizer adds the tokens {around} to each text; GGUF files cannot store this")
    fields.flags |= {"add_bos_token": begins, "add_eos_token": ends}
