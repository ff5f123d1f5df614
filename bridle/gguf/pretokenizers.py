"""Pre-tokenization of texts before byte-level BPE, by the names in GGUF files (`tokenizer.ggml.pre`). Each entry has
the same steps as the `tokenizer.json` of the model. A step is a pattern whose matches become separate words, a split of
digit runs, or GPT-2's rule. GPT-2's rule is part of the byte-level step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BIG, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_BIG}*{_SMALL}+|{_LEAD}{_BIG}+{_SMALL}*|\p{{N}}|{_SIGNS}|{_SPACES}"
_GPT4O = rf"{_LEAD}{_BIG}*{_SMALL}+{_ENDINGS}?|{_LEAD}{_BIG}+{_SMALL}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
#: Matches runs of digits in groups of three, counted from the end.
_DIGITS_FROM_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fd5\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_SPARK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_LEAD}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_ENDINGS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_FEWER_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_JAIS2 = _LLAMA3.replace(_SPACES, rf"\s*[\r\n]+|{_FEWER_SPACES}|\s{{1}}")
_NOT_HAN_BIG = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|{_LEAD}{_NOT_HAN_BIG}*{_NOT_HAN_SMALL}+{_ENDINGS}?|{_LEAD}{_NOT_HAN_BIG}+{_NOT_HAN_SMALL}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules that split a text into words. `steps` are applied in order; a tuple is a pattern whose matches become
    separate words. With `is_whole`, a word that is a token is not split by merges. `adds_bos` says whether BOS is added
    to a text if the file does not say so itself."""

    steps: tuple[str | tuple[str], ...]
    is_whole: bool = False
    adds_bos: bool = False
    is_composed: bool = False  # texts are first normalized to Unicode's composed form (NFC)


_LLAMA3_LIKE = PreTokenizer(((_LLAMA3,),), is_whole=True, adds_bos=True)
_QWEN2_LIKE = PreTokenizer(((_QWEN2,),), is_composed=True)
_GPT2_LIKE = PreTokenizer(("gpt2",))
_DIGITS_LIKE = PreTokenizer(("digit", "gpt2"))
_GPT4O_LIKE = PreTokenizer(((_GPT4O,),))

#: Pre-tokenizers by their names in files. Of several names with the same meaning, the first is written.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3_LIKE,
    **dict.fromkeys(
        ("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2", "falcon-h1", "jina-v5-nano"), _LLAMA3_LIKE
    ),
    "smaug-bpe": PreTokenizer(((_LLAMA3,),)),
    **dict.fromkeys(("dbrx", "chatglm-bpe"), PreTokenizer(((_LLAMA3,),))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(((_LLAMA3,),), is_whole=True)),
    "qwen2": _QWEN2_LIKE,
    **dict.fromkeys(("hunyuan", "megrez", "kormo", "f2llmv2"), _QWEN2_LIKE),
    "deepseek-r1-qwen": PreTokenizer(((_QWEN2,),)),
    **dict.fromkeys(("stablelm2", "solar-open", "grok-2"), PreTokenizer(((_QWEN2,),))),
    "qwen35": PreTokenizer(((_QWEN35,),), is_composed=True),
    "gpt-2": _GPT2_LIKE,
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4"), _GPT2_LIKE),
    **dict.fromkeys(
        ("trillion", "granite-docling", "modern-bert", "roberta-bpe", "jina-v1-en", "jina-v2-code"), _GPT2_LIKE
    ),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _GPT2_LIKE),
    "smollm": _DIGITS_LIKE,
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_LIKE),
    "falcon": PreTokenizer(("punctuation", "gpt2", ("[0-9][0-9][0-9]",))),
    "tekken": PreTokenizer(((_TEKKEN,),), is_whole=True),
    "gpt-4o": _GPT4O_LIKE,
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2", "talkie"), _GPT4O_LIKE),
    "granite-embed-multi-97m": PreTokenizer(((_GPT4O,),), is_whole=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer(((r"\d{1,3}(?=(?:\d{3})*\b)",), (_GPT4O,)))),
    "kimi-k2": PreTokenizer(((_KIMI,),)),
    "jais-2": PreTokenizer(((_JAIS2,),)),
    "superbpe": PreTokenizer(((r"\p{N}+",), (r"(?=(\d{3})+(?!\d))",))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer(((_BAILING,),))),
    "ufakzeka": PreTokenizer(((_QWEN2.removeprefix(f"{_ENDINGS}|"),),)),
    "exaone-moe": PreTokenizer(((_EXAONE_MOE,),)),
    "laguna": PreTokenizer(((r"[^\n]+|[\n]+",), (_QWEN2,))),
    "afmoe": PreTokenizer(((_DIGITS_FROM_END,), (_ASIAN,), (_DEEPSEEK3_WORDS,))),
    "youtu": PreTokenizer(((_YOUTU_SCRIPTS,), (_GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),)), is_whole=True),
    "spark2_5": PreTokenizer(((r"\p{N}{1,3}",), (_KANA,), (_SPARK_WORDS,), (r"\p{N}",))),
    "chameleon": PreTokenizer(
        (
            ("<sentinel:[0-9]+>",),
            ("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",),
            (r"([\t\n]|    |  )",),
            (r"\p{N}",),
            (r"[\p{P}!-/:-@\[-`{-~]",),
            "gpt2",
        ),
        adds_bos=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            ("[\r\n]",),
            (_DEEPSEEK_LETTERS,),
            ("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",),
            (r"\s+$",),
            (_CJK,),
            "digits",
        )
    ),
    "deepseek-coder": PreTokenizer((("[\r\n]",), (r"\s?\p{L}+",), (r"\s?\p{P}+",), (_CJK,), "digit")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        PreTokenizer(((r"\p{N}{1,3}",), (_KANA,), (_DEEPSEEK3_WORDS,))),
    ),
    "seed-coder": PreTokenizer(((rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer(((_BLOOM,),))),
    "viking": PreTokenizer(((_BLOOM,), "digit")),
    "minicpm5": PreTokenizer(((r"\p{N}{1,3}",), (_LLAMA3.replace("{1,3}", "+"),)), is_whole=True),
    "default": PreTokenizer(((r"[\p{P}\$\+<=>\^~\|]+",), "gpt2", (r"\p{N}+",), ("[0-9][0-9][0-9]",))),
}

#: Pre-tokenizer names of files that have merges, but merge whole texts as SentencePiece does.
WHOLE_TEXTS = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})


def pre_tokenizer_spec(name: str) -> dict[str, Any] | None:
    """Return the pre-tokenizer in the form of `tokenizer.json`; None for an unknown name."""
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        return None
    steps = [_step(step) for step in rule.steps]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, last]}


def _step(step: str | tuple[str]) -> dict[str, Any]:
    if isinstance(step, tuple):
        return _split(step[0])
    if step == "gpt2":
        return _split(_GPT2)
    if step == "punctuation":
        return {"type": "Punctuation", "behavior": "Contiguous"}
    return {"type": "Digits", "individual_digits": step == "digit"}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def name_of(spec: dict[str, Any] | None, is_whole: bool, is_composed: bool) -> str | None:
    """Return the name that GGUF files have for this pre-tokenizer; None if there is no such name."""
    wanted = _canonical(spec)
    for name, rule in PRE_TOKENIZERS.items():
        if (rule.is_whole, rule.is_composed) == (is_whole, is_composed) and _canonical(
            pre_tokenizer_spec(name)
        ) == wanted:
            return name
    return None


def _canonical(spec: dict[str, Any] | None) -> list[tuple[Any, ...]]:
    """Return the steps of a pre-tokenizer in a comparable form. A byte-level step that includes GPT-2's rule is
    returned as two steps."""
    steps = (spec or {}).get("pretokenizers", [spec] if spec else [])
    found: list[tuple[Any, ...]] = []
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            if step.get("add_prefix_space"):
                found.append(("prefix space",))
            found += [("Split", _GPT2, "Isolated", False)] * bool(step.get("use_regex", True))
        elif kind == "Split":
            pattern = step.get("pattern", {})
            found.append((kind, pattern.get("Regex", pattern), step.get("behavior"), step.get("invert", False)))
        else:
            found.append((kind, *sorted((key, value) for key, value in step.items() if key != "type")))
    return found
