"""Sampling parameters of a request: one immutable value, validated when it is created. Names and meanings of parameters
follow the OpenAI API and vLLM, as far as these have the parameter. The object does not depend on a model. Limits of the
model (vocabulary size, context length) are checked when the request is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from bridle.errors import InvalidRequest, UnknownKeyword
from bridle.safe_repr import short_repr
from bridle.sampling_values import (
    MAX_PROBES,
    MAX_STOP_STRING_CHARS,
    MAX_TOKENS_LIMIT,
    TINY,
    Watermark,
    check_bias_texts,
    check_biases,
    check_number,
    check_probes,
    check_scales,
    split_biases,
)

MAX_N = 64
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1_024
MAX_LOGPROBS = 100
MAX_SEED = 1 << 64
MAX_BAD_WORDS = 1_024
MAX_BANNED_PHRASES = 256
MAX_BAD_WORD_TOKENS = 1 << 14  # of all bad words together
MAX_BREAKER_IDS = 1 << 20
MAX_ALLOWED_TOKENS = 1 << 20
#: Maximum number of tokens that are drafted at once. Further below: the value that lets the engine decide.
MAX_DRAFTS = 64
MAX_PREDICTION_CHARS = 1 << 16
#: Maximum number of forced tokens after a candidate that count when a token is chosen.
MAX_LOOKAHEAD = 64
#: Maximum number of restarts of an output with aligned sampling.
MAX_ALIGNED = 1_024
AUTO_DRAFTS = -1
#: Values for a constraint's treatment of tokens that the tokenizer would not produce.
CANONICAL = ("strict", "prefer", "off")
#: Actions for a forced text that is less likely than its floor.
ON_FLOOR = ("flag", "refuse", "rewind")
DRAFT_WORDS: Mapping[str, int] = {"off": 0, "auto": AUTO_DRAFTS}

#: Endings of names of fields that have an effect only together with another field.
_NUMBERS_OF_OTHERS = ("_threshold", "_exponent", "_tau", "_eta", "_base", "_length", "_last_n", "_ids")

Part = Literal["draw", "report", "output"]
Api = Literal["openai", "tgi", "lmtp", "cli"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """Metadata of a field of `SamplingParams`, for all code that lists fields. `part` says what the field affects:
    `draw` the choice of a token, `report` the data returned about a token, `output` the whole output. A sampler needs
    the fields whose `part` is `draw` or `report`. With `may_change`, a controller may change the field for one token.
    `names` are the names of the field in APIs that name it differently. If `names` is None, the API does not support
    the field, or sets it by other fields. A number lies `within` two bounds, and must be an integer if the bounds are
    integers."""

    part: Part = "output"
    may_change: bool = False
    names: Mapping[Api, str | None] = field(default_factory=dict)
    within: tuple[float, float] | None = None


def _draw(default: Any, within: tuple[float, float] | None = None, **names: str | None) -> Any:
    return field(default=default, metadata={"meaning": Meaning("draw", True, names, within)})  # type: ignore[arg-type]


def _fixed(default: Any, within: tuple[float, float] | None = None, **names: str | None) -> Any:
    """Return a sampling field that must stay constant for the whole output, because its computation keeps a state or
    names texts."""
    return field(default=default, metadata={"meaning": Meaning("draw", False, names, within)})  # type: ignore[arg-type]


def _param(default: Any, within: tuple[float, float] | None = None, part: Part = "output", **names: str | None) -> Any:
    return field(default=default, metadata={"meaning": Meaning(part, False, names, within)})  # type: ignore[arg-type]


#: Minimum similarity of an unknown name to a known one, for a suggestion.
_ALIKE = 0.7


def _unknown(name: str) -> UnknownKeyword:
    """Return the error for an unknown field. The error names the field to use instead."""
    from bridle.compat.request_fields import BY_NAME
    from bridle.compat.suggestions import nearest

    row, known = BY_NAME.get(name), meanings()
    here = "" if row is None else row.here
    if here in known:
        hint = f"; here it is {here!r}"
    elif here:
        hint = f": {name} is a keyword of calls, as in LLM.generate(..., {here}=...)"
    elif row is not None:
        hint = f": {row.why}"
    else:
        close = nearest(name, known, _ALIKE)
        hint = "" if close is None else f"; did you mean {close!r}?"
    return UnknownKeyword(f"SamplingParams has no field {name!r}{hint}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request. All fields are validated when the object is created. An `InvalidRequest`
    names the field and the limit.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1, `min_p` 0 and `typical_p` 1 turn the filters off.
    `repetition_penalty` considers prompt and output (CTRL, arXiv 1909.05858). `presence_penalty` and
    `frequency_penalty` consider only the output (OpenAI). `max_tokens` None means that only the context length limits
    the output. `logprobs` None reports nothing, 0 reports the chosen token's log-probability, and k also reports the k
    most probable alternatives. `logprobs_mode` `raw` is the model's own distribution; `processed` is the distribution
    after bias and masks. Both modes report the distribution before temperature. `prompt_logprobs` is like `logprobs`,
    for the prompt tokens from `prompt_logprobs_start` on. Prompt tokens before that position need not be computed if
    they are cached. With `seed` None, a random seed is chosen when the request is admitted. The `n` outputs are forks
    of one sequence, and the prompt is computed once. With `watermark` None, the output has no watermark.

    `speculate` is the number of draft tokens at once; it changes only the speed. The value 0 (or `off`) means none, and
    -1 (or `auto`) means as many as increase the speed. If `speculate` is None, the engine's setting applies, or `auto`
    if there is a `prediction` of the output.

    Further samplers are off by default and have llama.cpp's names; `bridle.model.sampling` defines them:

    * `top_n_sigma` (arXiv 2411.07641);
    * `xtc_probability` and `xtc_threshold` (XTC);
    * `dynatemp_range` and `dynatemp_exponent` (a temperature that follows the entropy);
    * `mirostat` 2 with `mirostat_tau` and `mirostat_eta` (arXiv 2007.14966);
    * `dry_multiplier`, `dry_base`, `dry_allowed_length`, `dry_penalty_last_n` (-1: all tokens) and
      `dry_sequence_breakers` (DRY).

    At temperature 0, the most probable token is chosen, so of these samplers only DRY has an effect.

    With `allowed_token_ids`, only these tokens are sampled (vLLM). With `allowed_token_ids`, the end token is sampled
    only if it is listed too. Tokens that a constraint forces are not sampled. `logit_bias` may name texts as well as
    token ids. Each token of a text gets the addend (llama.cpp). `bad_words` are never completed, in two spellings:
    alone and after a space (vLLM). The text never contains any of `banned_phrases`, no matter how they are tokenized. A
    token that would complete a banned phrase is rolled back before the client sees it, and another token is sampled.
    Under a constraint, `canonical` requires the tokens that the tokenizer would produce: `strict` everywhere, `prefer`
    only where few tokens are allowed. The code that builds a request converts texts to tokens. The builder of a request
    sets `dry_breaker_ids`, `bad_words_ids` and `prediction_ids`. `bias_texts` are the entries of `logit_bias` that the
    builder converts.

    `constraint_report` measures how much probability constraints removed (`Usage.constraint`). `constraint_floor` is
    the minimum log-probability of a run of forced tokens. `on_constraint_floor` is the action for a run below the
    floor: `flag` counts it, and `refuse` ends the output with an error. `rewind` rolls back the run and the token that
    led to it. The token that led to the run is then banned at its position. `lookahead` is a number of forced tokens
    after a candidate token whose probability counts when the candidate is chosen. `aligned` is how often an output
    under a constraint may restart. Outputs with `aligned` have the probabilities that the model gives them among the
    allowed outputs.

    With `token_healing`, the last tokens of the prompt are removed if a longer token may replace them. The output then
    spells the removed text again, but shows only the text after it. `describe_constraint` adds a description of the
    constraint to the user's last message in a conversation. `control_vectors` are the scales, by name, with which
    loaded control vectors are added to the hidden states. Of the `n` outputs, only the `keep_best` outputs with the
    highest mean log-probability are returned (0: all). The other outputs end when they can no longer be among the best.
    `probes` are control vectors, each as NAME or NAME@LAYER. Controllers read the projections of the hidden states on
    the control vectors in `probes`.
    """

    n: int = _param(1, (1, MAX_N), tgi="best_of", lmtp=None, cli=None)
    max_tokens: int | None = _param(16, (0, MAX_TOKENS_LIMIT), tgi="max_new_tokens")
    min_tokens: int = _param(0, (0, MAX_TOKENS_LIMIT), tgi="min_new_tokens")
    temperature: float = _draw(1.0, (0.0, 100.0))
    top_p: float = _draw(1.0, (TINY, 1.0))
    top_k: int = _draw(0, (-1, MAX_TOKENS_LIMIT))
    min_p: float = _draw(0.0, (0.0, 1.0))
    typical_p: float = _draw(1.0, (TINY, 1.0))
    repetition_penalty: float = _draw(1.0, (0.01, 100.0))
    presence_penalty: float = _draw(0.0, (-100.0, 100.0))
    frequency_penalty: float = _draw(0.0, (-100.0, 100.0))
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata={"meaning": Meaning("draw")})
    seed: int | None = _param(None, (-(1 << 63), MAX_SEED - 1))  # what draws gets a key that comes of it
    stop: tuple[str, ...] = _param(())
    stop_token_ids: tuple[int, ...] = _param(())
    include_stop_str_in_output: bool = _param(False, tgi=None)
    ignore_eos: bool = _param(False)
    logprobs: int | None = _param(
        None, (0, MAX_LOGPROBS), part="report", tgi="top_n_tokens", lmtp="top_logprobs", cli=None
    )
    logprobs_mode: Literal["raw", "processed"] = _param(
        "raw", part="report", openai=None, tgi=None, lmtp=None, cli=None
    )
    prompt_logprobs: int | None = _param(
        None, (0, MAX_LOGPROBS), openai=None, tgi="decoder_input_details", lmtp=None, cli=None
    )
    prompt_logprobs_start: int = _param(0, (0, MAX_TOKENS_LIMIT), openai=None, tgi=None, lmtp=None, cli=None)
    skip_special_tokens: bool = _param(True, tgi=None)
    watermark: Watermark | None = field(default=None, metadata={"meaning": Meaning("draw")})
    top_n_sigma: float = _fixed(0.0, (-1.0, 1_000.0))
    xtc_probability: float = _fixed(0.0, (0.0, 1.0))
    xtc_threshold: float = _fixed(0.1, (TINY, 1.0))
    dynatemp_range: float = _fixed(0.0, (0.0, 100.0))
    dynatemp_exponent: float = _fixed(1.0, (0.0, 100.0))
    mirostat: int = _fixed(0, (0, 2))
    mirostat_tau: float = _fixed(5.0, (0.0, 100.0))
    mirostat_eta: float = _fixed(0.1, (0.0, 100.0))
    dry_multiplier: float = _fixed(0.0, (0.0, 1_000.0))
    dry_base: float = _fixed(1.75, (1.0, 100.0))
    dry_allowed_length: int = _fixed(2, (0, MAX_TOKENS_LIMIT))
    dry_penalty_last_n: int = _fixed(-1, (-1, MAX_TOKENS_LIMIT))
    dry_sequence_breakers: tuple[str, ...] = _param(("\n", ":", '"', "*"))
    dry_breaker_ids: tuple[int, ...] = _fixed((), openai=None, tgi=None, lmtp=None, cli=None)
    bad_words: tuple[str, ...] = _param(())
    banned_phrases: tuple[str, ...] = _param(())
    allowed_token_ids: tuple[int, ...] = _param(())
    bias_texts: tuple[tuple[str, float], ...] = _param((), openai=None, tgi=None, lmtp=None, cli=None)
    bad_words_ids: tuple[tuple[int, ...], ...] = _param((), openai=None, tgi=None, lmtp=None, cli=None)
    speculate: int | None = _param(None, (AUTO_DRAFTS, MAX_DRAFTS))
    prediction: str = _param("")
    prediction_ids: tuple[int, ...] = _param((), openai=None, tgi=None, lmtp=None, cli=None)
    canonical: str = _param("off")
    constraint_report: bool = _param(False)
    constraint_floor: float | None = _param(None, (-10_000.0, 0.0))
    on_constraint_floor: str = _param("flag")
    lookahead: int = _param(0, (0, MAX_LOOKAHEAD))
    aligned: int = _param(0, (0, MAX_ALIGNED))
    token_healing: bool = _param(False)
    describe_constraint: bool = _param(False)
    control_vectors: Mapping[str, float] = field(default_factory=dict, metadata={"meaning": Meaning()})
    probes: tuple[str, ...] = _param(())
    keep_best: int = _param(0, (0, MAX_N), openai=None, tgi=None, lmtp=None, cli=None)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **given: Any) -> SamplingParams:
            if not given.keys() <= cls.__dataclass_fields__.keys():
                raise _unknown(next(name for name in given if name not in cls.__dataclass_fields__))
            return object.__new__(cls)

    def __post_init__(self) -> None:
        _freeze_collections(self)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is type(low) and low <= value <= high:
                continue  # true for most fields
            if value is not None or name not in _OPTIONAL:
                check_number(name, value, low, high)
        if self.logprobs_mode not in ("raw", "processed"):
            raise InvalidRequest(
                f"logprobs_mode is {self.logprobs_mode!r}; must be 'raw' or 'processed'", "logprobs_mode"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens is 0; must be at least 1, or send prompt_logprobs to only score the prompt", "max_tokens"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        for name, known in (("canonical", CANONICAL), ("on_constraint_floor", ON_FLOOR)):
            if getattr(self, name) not in known:
                words = ", ".join(map(repr, known))
                raise InvalidRequest(f"{name} is {short_repr(getattr(self, name))}; must be one of {words}", name)
        if self.mirostat == 1:
            raise InvalidRequest("mirostat is 1; must be 0 (off) or 2 (Mirostat 2.0)", "mirostat")
        if self.aligned:
            _check_aligned(self)
        _check_lists(self)
        if not isinstance(self.prediction, str) or len(self.prediction) > MAX_PREDICTION_CHARS:
            raise InvalidRequest(f"prediction must be text of at most {MAX_PREDICTION_CHARS} characters", "prediction")
        if self.bias_texts:
            check_bias_texts(self.bias_texts)
        if self.logit_bias:
            check_biases(self.logit_bias)
        if self.control_vectors:
            check_scales(self.control_vectors)
        if self.probes:
            check_probes(self.probes)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def measures_constraint(self) -> bool:
        """Return whether the effects of constraints are measured."""
        return self.constraint_report or self.constraint_floor is not None or self.aligned > 0

    @property
    def takes_text_back(self) -> bool:
        """Return whether text may be rolled back because of its probability."""
        return self.aligned > 0 or (self.constraint_floor is not None and self.on_constraint_floor == "rewind")

    @property
    def scores_output(self) -> bool:
        """Return whether the log-probabilities of all output tokens are computed, including forced tokens."""
        return self.logprobs is not None or self.measures_constraint

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def has_texts(self) -> bool:
        """Return whether some fields are given as texts, which a tokenizer must convert."""
        return bool(self.bad_words or self.prediction or self.bias_texts) or (
            self.has_dry and bool(self.dry_sequence_breakers)
        )

    @property
    def has_mirostat(self) -> bool:
        return self.mirostat == 2 and not self.is_greedy

    def with_(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed. The copy is validated again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as data that JSON can represent."""
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: value for name, value in changed.items() if value != getattr(DEFAULT_SAMPLING, name)}
        mark = changed.pop("watermark", None)
        if mark is not None and not mark.key:  # an operator's watermark is hidden from the client
            changed["watermark"] = {"gamma": mark.gamma, "delta": mark.delta}
        return changed


def _freeze_collections(params: SamplingParams) -> None:
    for name in _TEXTS:
        texts: object = getattr(params, name)  # callers may pass one string, a list or None
        object.__setattr__(params, name, (texts,) if isinstance(texts, str) else tuple(texts or ()))  # type: ignore[arg-type]
    for name in _MOST_IDS:
        object.__setattr__(params, name, tuple(getattr(params, name) or ()))
    object.__setattr__(params, "bad_words_ids", tuple(map(tuple, params.bad_words_ids or ())))
    object.__setattr__(params, "bias_texts", tuple((text, addend) for text, addend in params.bias_texts or ()))
    bias, texts = split_biases(params.logit_bias) if params.logit_bias else ({}, ())
    object.__setattr__(params, "bias_texts", (*params.bias_texts, *texts))
    object.__setattr__(params, "logit_bias", bias)
    object.__setattr__(params, "control_vectors", params.control_vectors or {})
    if params.watermark is not None:
        object.__setattr__(params, "watermark", Watermark.of(params.watermark))
    if params.speculate is not None:
        object.__setattr__(params, "speculate", drafts_of(params.speculate))


def _check_aligned(params: SamplingParams) -> None:
    """Raise `InvalidRequest` for fields that would change the distribution which aligned sampling must keep."""
    for each in fields(params):
        value = getattr(params, each.name)
        is_usual = value == getattr(DEFAULT_SAMPLING, each.name) or (each.name, value) == ("top_k", -1)
        if not is_usual and (_bends(each) or each.name in ("banned_phrases", "lookahead")):
            message = f"{each.name}: got {short_repr(value)} with aligned; it keeps the model's own distribution. "
            raise InvalidRequest(message + "Leave out one of the two; temperature must be 1.", each.name)


def _bends(given: Field[Any]) -> bool:
    """Return whether a field changes the probabilities of tokens, and is not just a setting of another field."""
    return given.metadata["meaning"].part == "draw" and not given.name.endswith(_NUMBERS_OF_OTHERS)


def drafts_of(given: Any) -> Any:
    """Return the number of draft tokens that a number or a word stands for. Raises `InvalidRequest` for any other
    value."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if not isinstance(given, str) or given not in DRAFT_WORDS:
        words = ", ".join(map(repr, DRAFT_WORDS))
        raise InvalidRequest(
            f"speculate is {short_repr(given)}; must be {words}, or a number of tokens up to {MAX_DRAFTS}", "speculate"
        )
    return DRAFT_WORDS[given]


#: Lists of texts: maximum number of entries, maximum characters of an entry, and words for error messages.
_TEXTS = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS, "strings", "a stop string has"),
    "dry_sequence_breakers": (MAX_STOP_STRINGS, 64, "entries", "dry_sequence_breakers has an entry of"),
    "bad_words": (MAX_BAD_WORDS, MAX_STOP_STRING_CHARS, "entries", "bad_words has an entry of"),
    "banned_phrases": (MAX_BANNED_PHRASES, MAX_STOP_STRING_CHARS, "entries", "banned_phrases has an entry of"),
    "probes": (MAX_PROBES, 128, "entries", "probes has an entry of"),
}
_MOST_IDS = {
    "stop_token_ids": MAX_STOP_TOKENS,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "dry_breaker_ids": MAX_BREAKER_IDS,
    "prediction_ids": MAX_PREDICTION_CHARS,
}


def _check_lists(params: SamplingParams) -> None:
    for name, (most, most_chars, entries, an_entry) in _TEXTS.items():
        texts = getattr(params, name)
        if len(texts) > most:
            raise InvalidRequest(f"{name} has {len(texts)} {entries}; at most {most}", name)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"{name} holds {text!r}; every entry must be a non-empty string", name)
            if len(text) > most_chars:
                raise InvalidRequest(f"{an_entry} {len(text)} characters; at most {most_chars}", name)
    for name, most in _MOST_IDS.items():
        ids = getattr(params, name)
        if len(ids) > most:
            raise InvalidRequest(f"{name} has {len(ids)} ids; at most {most}", name)
    for token in params.stop_token_ids:
        check_number("stop_token_ids", token, 0, MAX_TOKENS_LIMIT)
    num_tokens = sum(map(len, params.bad_words_ids))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(f"bad_words has {num_tokens} tokens; at most {MAX_BAD_WORD_TOKENS} in all", "bad_words")
    for word in params.bad_words_ids:
        if not word:
            raise InvalidRequest("bad_words_ids holds an empty list; every entry needs a token", "bad_words_ids")
        for token in word:
            check_number("bad_words_ids", token, 0, MAX_TOKENS_LIMIT)


# -- metadata of the fields --------------------------------------------------------------------------------


def meanings(params: type[SamplingParams] = SamplingParams) -> dict[str, Meaning]:
    """Return every sampling field with its metadata."""
    return {each.name: each.metadata["meaning"] for each in fields(params)}


_RANGES = {name: meaning.within for name, meaning in meanings().items() if meaning.within is not None}
_OPTIONAL = frozenset(each.name for each in fields(SamplingParams) if str(each.type).endswith("| None"))
DEFAULT_SAMPLING = SamplingParams()


def fields_on(api: Api, params: type[SamplingParams] = SamplingParams) -> tuple[str, ...]:
    """Return the fields that an API accepts under the names in `SamplingParams`."""
    return tuple(name for name, meaning in meanings(params).items() if meaning.names.get(api, name) == name)


#: Fields that affect sampling: only these are sent to a shard.
SENT_WITH_DRAWS = tuple(name for name, meaning in meanings().items() if meaning.part != "output")
#: Fields that a controller may change for one sampled token.
OVERRIDABLE = frozenset(name for name, meaning in meanings().items() if meaning.may_change)
