"""Structured values of sampling parameters: token biases and a watermark. The module also has checks of numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr

MAX_STOP_STRING_CHARS = 1_024
MAX_TOKENS_LIMIT = 1 << 31
MAX_LOGIT_BIAS = 1 << 20
_MANY_BIASES = 256  # more biases than this are packed
MAX_BIAS_TEXTS = 256
#: Maximum number of options of a choice that are scored as a whole, and maximum number of all their tokens.
MAX_SCORED, MAX_OPTION_TOKENS = 4_096, 16_384
#: Maximum number of last tokens that determine the green list of a watermark.
MAX_WATERMARK_CONTEXT = 8
#: Maximum number of control vectors of a request, their maximum scale, and maximum number of probes.
MAX_CONTROL_VECTORS, MAX_SCALE, MAX_PROBES = 8, 1_000.0, 8
#: The smallest number above 0.
TINY = math.ulp(0.0)


class LogitBias(Mapping[int, float]):
    """Biases of many tokens in packed form. So a mask over half of a large vocabulary is two arrays, not a hundred
    thousand objects. `tokens` are different 64-bit integers; `addends` are doubles. Neither of the two arrays may be
    changed."""

    __slots__ = ("_by_token", "addends", "tokens")

    def __init__(self, tokens: array[int], addends: array[float]) -> None:
        self.tokens = tokens
        self.addends = addends
        self._by_token: dict[int, float] | None = None

    @classmethod
    def of(cls, bias: Mapping[int, float]) -> LogitBias:
        """Check a mapping and return it in packed form. Raises `InvalidRequest`."""
        try:
            if not (set(map(type, bias)) <= {int} and set(map(type, bias.values())) <= {int, float}):
                raise ValueError
            packed = cls(array("q", bias), array("d", bias.values()))
            # The sum is infinite or NaN exactly if an entry may be; only then is each entry checked.
            if bias and (min(packed.tokens) < 0 or not math.isfinite(sum(packed.addends))):
                raise ValueError
        except (ValueError, OverflowError):
            check_biases(bias)  # raises an error that names the invalid entry, if there is one
            packed = cls(array("q", bias), array("d", bias.values()))
        return packed

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    def __getitem__(self, token: int) -> float:
        if self._by_token is None:
            self._by_token = dict(zip(self.tokens, self.addends, strict=True))
        return self._by_token[token]


@dataclass(frozen=True, slots=True)
class Watermark:
    """A green-list watermark (arXiv 2301.10226): the logits of a share `gamma` of the vocabulary are raised by `delta`.
    A policy sets a secret `key`. The key and the last `context` tokens determine which tokens belong to the raised
    share. Requests cannot set a key."""

    gamma: float = 0.5
    delta: float = 2.0
    key: str = field(default="", repr=False)
    context: int = 1

    def __post_init__(self) -> None:
        check_number("watermark.gamma", self.gamma, TINY, 1.0)
        check_number("watermark.delta", self.delta, -100.0, 100.0)
        check_number("watermark.context", self.context, 1, MAX_WATERMARK_CONTEXT)

    @classmethod
    def of(cls, given: object) -> Watermark | None:
        """Read the value of a caller: True for the default watermark, False for none, or the watermark's fields as
        plain data."""
        if isinstance(given, Watermark):
            return given
        if isinstance(given, bool):
            return cls() if given else None
        if isinstance(given, Mapping) and given.keys() <= {"gamma", "delta"}:
            return cls(**given)
        raise InvalidRequest(f"watermark is {str(given)[:80]!r}; must be true, false, or gamma and delta", "watermark")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise `InvalidRequest` if the value is not a number from `low` to `high`. The value must be an integer if `low`
    is an integer."""
    is_whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        raise InvalidRequest(f"{name} is {value!r}; must be {'an integer' if is_whole else 'a number'}", name)
    if low <= value <= high:  # NaN fails both comparisons
        return
    if is_whole:
        raise InvalidRequest(f"{name} is {value}; must be between {low} and {high}", name)
    shown = "more than 0" if low == TINY else f"at least {low:g}"
    raise InvalidRequest(f"{name} is {value}; must be {shown} and at most {high:g}", name)


def split_biases(bias: Mapping[Any, float]) -> tuple[Mapping[int, float], tuple[tuple[str, float], ...]]:
    """Return the biases of token ids, packed if there are many, and the biases of texts."""
    if isinstance(bias, LogitBias):
        return bias, ()
    texts: tuple[tuple[str, float], ...] = ()
    if str in set(map(type, bias)):
        texts = tuple((key, value) for key, value in bias.items() if isinstance(key, str))
        bias = {key: value for key, value in bias.items() if not isinstance(key, str)}
    return LogitBias.of(bias) if _MANY_BIASES < len(bias) <= MAX_LOGIT_BIAS else dict(bias), texts


def check_bias_texts(texts: tuple[tuple[str, float], ...]) -> None:
    """Raise `InvalidRequest` for too many texts, a text that is empty or too long, or an invalid addend."""
    if len(texts) > MAX_BIAS_TEXTS:
        raise InvalidRequest(f"logit_bias names {len(texts)} texts; at most {MAX_BIAS_TEXTS}", "logit_bias")
    for text, value in texts:
        if not text or len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"logit_bias has a text of {len(text)} characters; must have 1 to {MAX_STOP_STRING_CHARS}",
                "logit_bias",
            )
        _check_addend(short_repr(text), value)


def check_biases(bias: Mapping[int, float]) -> None:
    """Raise `InvalidRequest` for too many biases, or if an entry does not map a token id to a number."""
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS}", "logit_bias")
    for token, value in () if isinstance(bias, LogitBias) else bias.items():  # a packed bias was already checked
        check_number("logit_bias", token, 0, MAX_TOKENS_LIMIT)
        _check_addend(token, value)


def _check_addend(name: int | str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidRequest(f"logit_bias[{name}] is {value!r}; must be a number", "logit_bias")
    if value == math.inf:
        raise InvalidRequest(f"logit_bias[{name}] is infinite; must be finite or -inf", "logit_bias")


def check_scales(scales: Mapping[str, float]) -> None:
    """Raise `InvalidRequest` for too many control vectors, or for an invalid name or scale."""
    if not isinstance(scales, Mapping):
        raise InvalidRequest(
            f"control_vectors: got {short_repr(scales)}; must map names to scales, such as {{'polite': 0.5}}",
            "control_vectors",
        )
    if len(scales) > MAX_CONTROL_VECTORS:
        raise InvalidRequest(
            f"control_vectors: got {len(scales)} names; at most {MAX_CONTROL_VECTORS}. Leave out some.",
            "control_vectors",
        )
    for name, scale in scales.items():
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"control_vectors: got {short_repr(name)}; names must be texts", "control_vectors")
        try:
            check_number(f"control_vectors[{short_repr(name)}]", scale, -MAX_SCALE, MAX_SCALE)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "control_vectors") from None


def check_probes(probes: tuple[str, ...]) -> None:
    """Raise `InvalidRequest` for an entry of `probes` that is not NAME or NAME@LAYER."""
    for probe in probes:
        name, layer = split_probe(probe)
        if not name or layer == 0:
            raise InvalidRequest(
                f"probes: got {short_repr(probe)}; must be NAME or NAME@LAYER, such as 'polite@12'", "probes"
            )


def split_probe(probe: str) -> tuple[str, int | None]:
    """Return the control vector and the layer that an entry of `probes` names. The layer is None for the last layer,
    and 0 for an invalid layer."""
    name, at, layer = probe.partition("@")
    is_number = layer.isascii() and layer.isdigit() and len(layer) < 6
    return name, (int(layer) if is_number else 0) if at else None
