"""Converts the tokenizer of a GGUF file to a `tokenizer.json`, so that the usual libraries can read it. These kinds of
tokenizers are supported: byte-level BPE (`gpt2`), SentencePiece BPE as scores (`llama`) or as merges (`gemma4`),
SentencePiece unigram (`t5`), and WordPiece (`bert`). For other kinds, the error names the kind.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridle.errors import UnsupportedModel
from bridle.gguf.pretokenizers import PRE_TOKENIZERS, WHOLE_TEXTS, pre_tokenizer_spec
from bridle.gguf.shards import GgufModel
from bridle.safe_repr import short_repr

#: Kinds of tokens, by their numbers in files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKEN_CHARS = 1 << 16

#: Control tokens that end a turn in some family. Files name one token that ends a text; chats have further ones.
END_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
        *("<｜end▁of▁sentence｜>", "</s>", "<eos>"),
    }
)
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_BERT_MARKS = {"bos": "[CLS]", "eos": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]"}
_PADDING = re.compile(r"\[PAD\d+\]")
_SPACE = "\u2581"
_KEPT_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The contents of `tokenizer.json`, the special tokens by role, the tokens that end an output, and the chat
    templates."""

    spec: dict[str, Any]
    roles: dict[str, str]
    end_ids: tuple[int, ...]
    chat_template: str | list[dict[str, str]] | None


def read_vocabulary(model: GgufModel) -> GgufVocabulary:
    """Read the vocabulary. Raises `UnsupportedModel` if the file has no usable tokenizer."""
    kind = model.text("tokenizer.ggml.model")
    build = _BUILDERS.get(kind or "")
    if build is None:
        raise UnsupportedModel(f"{model.path}: unknown tokenizer model {short_repr(kind)}; known are {_KNOWN}")
    pieces = _Pieces(model)
    spec = build(model, pieces)
    spec |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": pieces.added()}
    spec["post_processor"] = _around(pieces, *_adds(model, kind or ""))
    return GgufVocabulary(spec, pieces.roles, pieces.ends(), _templates(model))


class _Pieces:
    """The tokens of a file with their kinds, and the special tokens by role."""

    def __init__(self, model: GgufModel) -> None:
        self.path = model.path
        self.texts = model.texts("tokenizer.ggml.tokens")
        if not self.texts:
            raise UnsupportedModel(f"{model.path} holds no tokens, so it has no tokenizer; name one with --tokenizer")
        kinds = model.numbers("tokenizer.ggml.token_type")
        if len(kinds) not in (0, len(self.texts)):
            raise UnsupportedModel(f"{model.path} has {len(self.texts)} tokens, but {len(kinds)} token types")
        self.kinds = [int(kind) for kind in kinds] or [NORMAL] * len(self.texts)
        long = max(map(len, self.texts))
        if long > MAX_TOKEN_CHARS:
            raise UnsupportedModel(f"{model.path} has a token of {long} characters; at most {MAX_TOKEN_CHARS} are read")
        self.ids: dict[str, int] = {}
        for number, text in enumerate(self.texts):
            if not (self.kinds[number] == UNUSED and _PADDING.fullmatch(text)):
                self.ids.setdefault(text, number)
        # Phi-3's special tokens remove the spaces after them; files do not state this.
        self.strips_marks = (
            model.text("general.architecture") == "phi3" and model.text("tokenizer.ggml.model") == "llama"
        )
        self.by_role = dict(self._with_roles(model))
        self.roles = {_ROLES[role]: self.texts[token] for role, token in self.by_role.items() if role in _ROLES}

    def _with_roles(self, model: GgufModel) -> Iterator[tuple[str, int]]:
        for role in (*_ROLES, "eot", "eom"):
            key = f"tokenizer.ggml.{role}_token_id"
            if key in model.metadata:
                token = model.integer(key, high=(1 << 32) - 1)
                if token < len(self.texts):  # files use -1, and numbers beyond the vocabulary, for no token
                    yield role, token
        if model.text("tokenizer.ggml.model") == "bert":
            for role, text in _BERT_MARKS.items():
                if f"tokenizer.ggml.{role}_token_id" not in model.metadata and text in self.ids:
                    yield role, self.ids[text]

    def added(self) -> list[dict[str, Any]]:
        """Return `added_tokens`: the tokens that are matched in a text before it is split into words."""
        wanted = (CONTROL, USER_DEFINED, UNKNOWN)
        return [
            {
                "id": token,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": self.strips_marks and text not in _KEPT_BLANKS,
                "normalized": False,
                "special": self.kinds[token] != USER_DEFINED,
            }
            for text, token in self.ids.items()
            if self.kinds[token] in wanted and text
        ]

    def ends(self) -> tuple[int, ...]:
        """Return the end tokens that the file names, then the tokens whose texts are known to end a turn."""
        named = [self.by_role[role] for role in ("eos", "eot", "eom") if role in self.by_role]
        known = [self.ids[name] for name in sorted(END_NAMES & self.ids.keys())]
        return tuple(dict.fromkeys([*named, *(token for token in known if self.kinds[token] == CONTROL)]))


# -- the kinds --------------------------------------------------------------------------------------------------


def _byte_level(model: GgufModel, pieces: _Pieces) -> dict[str, Any]:
    name = model.text("tokenizer.ggml.pre") or "default"
    if name in WHOLE_TEXTS:
        return _merged_pieces(model, pieces)
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"{model.path}: the pre-tokenizer {short_repr(name)} is not known; name the original tokenizer with "
            "--tokenizer"
        )
    return {
        "normalizer": {"type": "NFC"} if rule.is_composed else None,
        "pre_tokenizer": pre_tokenizer_spec(name),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(pieces.ids, _known_merges(model, pieces), ignore_merges=rule.is_whole),
    }


def _spaced_words(model: GgufModel, pieces: _Pieces) -> dict[str, Any]:
    """Return a BPE tokenizer over the characters of words. Decoding cannot restore the whitespace between words."""
    unknown = pieces.texts[pieces.by_role["unknown"]] if "unknown" in pieces.by_role else None
    is_lower = model.flag("tokenizer.ggml.normalizer.lowercase", False)
    return {
        "normalizer": {"type": "Lowercase"} if is_lower else None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "Fuse"},
        "model": _bpe(pieces.ids, _known_merges(model, pieces), unk_token=unknown),
    }


def _known_merges(model: GgufModel, pieces: _Pieces) -> list[tuple[str, str]]:
    """Return those merges of a file whose parts and result are tokens."""
    merges, ids = [_pair(text) for text in model.texts("tokenizer.ggml.merges")], pieces.ids
    known = [pair for pair in merges if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids]
    if len(known) < len(merges) // 2:
        raise UnsupportedModel(f"{model.path}: {len(merges) - len(known)} of {len(merges)} merges name unknown tokens")
    return known


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge into its two tokens, at the first space that is not the first character."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentencepiece(model: GgufModel, pieces: _Pieces) -> dict[str, Any]:
    scores = model.numbers("tokenizer.ggml.scores")
    if len(scores) != len(pieces.texts):
        raise UnsupportedModel(f"{model.path} has {len(pieces.texts)} tokens, but {len(scores)} scores")
    return _whole_texts(
        pieces, _merges_of(pieces, scores.tolist()), model.flag("tokenizer.ggml.add_space_prefix", True)
    )


def _merged_pieces(model: GgufModel, pieces: _Pieces) -> dict[str, Any]:
    return _whole_texts(pieces, _known_merges(model, pieces), model.flag("tokenizer.ggml.add_space_prefix", False))


def _whole_texts(pieces: _Pieces, merges: list[tuple[str, str]], has_prefix: bool) -> dict[str, Any]:
    """Return a BPE tokenizer over texts that are not split into words. Unknown characters become byte tokens."""
    unknown = pieces.texts[pieces.by_role["unknown"]] if "unknown" in pieces.by_role else None
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    lead = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    steps = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []),
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*lead, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(pieces.ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }


def _merges_of(pieces: _Pieces, scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges in SentencePiece's order: the merge whose result has the best score comes first. Several pairs
    of tokens can form the same token; all such pairs are merges."""
    ids, kinds = pieces.ids, pieces.kinds
    ranked = sorted(
        (token for token in ids.values() if kinds[token] in (NORMAL, UNUSED)), key=lambda token: -scores[token]
    )
    merges: list[tuple[str, str]] = []
    for token in ranked:
        piece = pieces.texts[token]
        found = [
            (left, right) for at in range(1, len(piece)) if (left := piece[:at]) in ids and (right := piece[at:]) in ids
        ]
        if len(found) > 1:
            found.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += found
    return merges


def _unigram(model: GgufModel, pieces: _Pieces) -> dict[str, Any]:
    scores = model.numbers("tokenizer.ggml.scores")
    if len(scores) != len(pieces.texts):
        raise UnsupportedModel(f"{model.path} has {len(pieces.texts)} tokens, but {len(scores)} scores")
    steps: list[dict[str, Any]] = []
    charsmap = model.numbers("tokenizer.ggml.precompiled_charsmap")
    if charsmap.nbytes:
        encoded = base64.b64encode(charsmap.astype("u1").tobytes()).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if model.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append({"type": "Strip", "strip_left": False, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": _SPACE})
    scheme = "always" if model.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    space = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": True}
    vocabulary = [[text, float(score)] for text, score in zip(pieces.texts, scores.tolist(), strict=True)]
    unknown = pieces.by_role.get("unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": space,
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": BYTE in pieces.kinds},
    }


def _word_piece(model: GgufModel, pieces: _Pieces) -> dict[str, Any]:
    """Return a WordPiece tokenizer. Files mark the tokens that begin a word; `tokenizer.json` marks all other
    tokens."""
    vocabulary = {_continued(text): number for text, number in pieces.ids.items()}
    unknown = pieces.texts[pieces.by_role["unknown"]] if "unknown" in pieces.by_role else "[UNK]"
    is_lower = model.flag("tokenizer.ggml.normalizer.lowercase", True)
    accents = model.flag("tokenizer.ggml.normalizer.strip_accents", is_lower)
    settings = {"unk_token": unknown, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    changes = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": accents, "lowercase": is_lower}
    return {
        "normalizer": {"type": "BertNormalizer", **changes},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", **settings, "vocab": vocabulary},
    }


def _continued(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return text
    return text[1:] if text.startswith(_SPACE) else f"##{text}"


def _bpe(ids: Mapping[str, int], merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **plain, **settings, "vocab": dict(ids), "merges": merges}


_BUILDERS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "t5": _unigram,
    "gemma4": _merged_pieces,
    "bert": _word_piece,
    "whitespace": _spaced_words,
}
_KNOWN = ", ".join(_BUILDERS)


# -- what stands around a text ------------------------------------------------------------------------------------


def _adds(model: GgufModel, kind: str) -> tuple[bool, bool]:
    """Return whether BOS, and whether EOS, is added to a text. Files without flags for BOS and EOS get llama.cpp's
    defaults."""
    rule = PRE_TOKENIZERS.get(model.text("tokenizer.ggml.pre") or "default")
    begins = kind in ("llama", "bert") or (kind == "gpt2" and rule is not None and rule.adds_bos)
    if kind == "gemma4":  # in all its files
        return True, model.flag("tokenizer.ggml.add_eos_token", False)
    return (
        model.flag("tokenizer.ggml.add_bos_token", begins),
        model.flag("tokenizer.ggml.add_eos_token", kind in ("t5", "bert")),
    )


def _around(pieces: _Pieces, adds_bos: bool, adds_eos: bool) -> dict[str, Any] | None:
    before = ["bos"] * (adds_bos and "bos" in pieces.by_role)
    after = ["eos"] * (adds_eos and "eos" in pieces.by_role)
    if not before and not after:
        return None
    names = {role: pieces.texts[pieces.by_role[role]] for role in (*before, *after)}

    def row(letter: str, number: int) -> list[dict[str, Any]]:
        marks = [{"SpecialToken": {"id": names[role], "type_id": number}} for role in (*before, *after)]
        text = {"Sequence": {"id": letter, "type_id": number}}
        return [*marks[: len(before)], text, *marks[len(before) :]]

    return {
        "type": "TemplateProcessing",
        "single": row("A", 0),
        "pair": row("A", 0) + row("B", 1),
        "special_tokens": {
            name: {"id": name, "ids": [pieces.by_role[role]], "tokens": [name]} for role, name in names.items()
        },
    }


def _templates(model: GgufModel) -> str | list[dict[str, str]] | None:
    """Return the chat template, or a list of templates with their names; None if the file has no template."""
    default = model.text("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    others = [
        {"name": key.removeprefix(prefix), "template": str(value)}
        for key, value in model.metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    ]
    if not others:
        return default
    return [*([{"name": "default", "template": default}] if default is not None else []), *others]
