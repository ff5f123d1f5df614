"""Flags that are derived from the sampling parameters: one that is added there is taken on the command line, too.

A group of flags that has a rule of its own for one writes it down, which takes the place of the derived one. What is
left out stays None, or an empty list. Ranges are checked where `SamplingParams` are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, make_dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from bridle.errors import InvalidRequest
from bridle.safe_repr import short_repr
from bridle.sampling import SamplingParams, fields_on, meanings

FURTHER = Group("Further sampling", sort_key=16)

_FLAG = bool | None
_TEXTS = tuple[str, ...]
_IDS = tuple[int, ...]
#: The type of a flag, by that of the sampling parameter.
_KINDS: Mapping[str, Any] = {
    "int": int | None,
    "float": float | None,
    "bool": _FLAG,
    "str": str | None,
    "Watermark": _FLAG,
    "tuple[str, ...]": _TEXTS,
    "tuple[int, ...]": _IDS,
    "Mapping[int, float]": _TEXTS,
}
#: What a flag's help begins with. One that is not here has the name of its field.
_TOLD: Mapping[str, str] = {
    "min_tokens": "No end before so many tokens.",
    "typical_p": "Draw among the tokens whose surprise is nearest to the expected one, up to this probability.",
    "presence_penalty": "Taken from the logit of each token that the output has.",
    "frequency_penalty": "Taken from the logit of a token for each time that the output has it.",
    "logit_bias": "TOKEN=ADDEND adds to the logit of a token id, or of each token of a text.",
    "stop_token_ids": "A token id that ends the output.",
    "include_stop_str_in_output": "Print the text of `--stop` that ended the output, too.",
    "ignore_eos": "Go on after the model's end token. Default: only under a sandboxed controller.",
    "skip_special_tokens": "Leave the texts of special tokens out.",
    "watermark": "Write a green-list watermark.",
    "top_n_sigma": "Only tokens at most so many standard deviations below the largest logit.",
    "xtc_probability": "XTC: how often the likeliest tokens go, but for the least likely of them.",
    "xtc_threshold": "XTC: tokens of at least this probability are such.",
    "dynatemp_range": "How far the temperature goes down and up with the entropy.",
    "dynatemp_exponent": "The power of the entropy for that.",
    "mirostat": "2 is Mirostat 2.0, 0 none.",
    "mirostat_tau": "Mirostat: the surprise to hold, in bits.",
    "mirostat_eta": "Mirostat: how fast it follows.",
    "dry_multiplier": "DRY: what a token loses that would go on with a repetition.",
    "dry_base": "DRY: the factor for each further token of the repetition.",
    "dry_allowed_length": "DRY: the longest repetition that loses nothing.",
    "dry_penalty_last_n": "DRY: how many of the last tokens count; -1 is all.",
    "dry_sequence_breakers": "DRY: a text across which nothing counts as a repetition.",
    "bad_words": "A text that is never completed.",
    "banned_phrases": "A text that the output never holds.",
    "allowed_token_ids": "A token id that may be drawn; none else.",
    "prediction": "Most of what the output will be, which is drafted first.",
}


def derived_options(params: type[SamplingParams] = SamplingParams) -> type[Any]:
    """A group of flags with every sampling parameter that the command line takes."""
    taken = fields_on("cli", params)
    return make_dataclass(
        "DerivedOptions",
        [_option(each, params) for each in fields(params) if each.name in taken],
        frozen=True,
        kw_only=True,
    )


def _option(given: Field[Any], params: type[SamplingParams]) -> tuple[str, Any, Any]:
    """Name, type and default of the flag for one field."""
    kind = _KINDS[str(given.type).removesuffix(" | None")]
    is_list, told = kind in (_TEXTS, _IDS), _TOLD.get(given.name, f"`{given.name}` of sampling parameters.")
    if is_list:
        flag = Parameter(group=FURTHER, help=f"{told} May be given several times.", negative="")
        return given.name, Annotated[kind, flag], field(default=())
    if meanings(params)[given.name].within is not None and given.default is not None:
        told = f"{told} Default: {given.default:g}."
    return given.name, Annotated[kind, Parameter(group=FURTHER, help=told)], field(default=None)


def read_biases(given: tuple[str, ...]) -> dict[int | str, float]:
    """The addends that `--logit-bias` flags name. Raises `InvalidRequest`."""
    found: dict[int | str, float] = {}
    for item in given:
        name, sign, addend = item.rpartition("=")
        try:
            found[int(name) if name.isascii() and name.isdigit() else name] = float(addend)
        except ValueError:
            sign = ""
        if not sign or not name:
            raise InvalidRequest(
                f"--logit-bias is {short_repr(item)}; must be TOKEN=ADDEND: a token id or a text, and a number",
                "logit_bias",
            )
    return found
