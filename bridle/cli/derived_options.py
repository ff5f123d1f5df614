"""Derives flags from the sampling parameters, so that every new parameter also has a flag.

A class of flags may declare a flag itself, which replaces the derived flag. Omitted flags are None, or an
empty list. `SamplingParams` validates the values.
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
#: The type of a flag, by the type of the sampling parameter.
_KINDS: Mapping[str, Any] = {
    "int": int | None,
    "float": float | None,
    "bool": _FLAG,
    "str": str | None,
    "Watermark": _FLAG,
    "tuple[str, ...]": _TEXTS,
    "tuple[int, ...]": _IDS,
    "Mapping[int, float]": _TEXTS,
    "Mapping[str, float]": _TEXTS,
}
#: The first sentence of a flag's help. A parameter that is missing here gets a sentence with its name.
_TOLD: Mapping[str, str] = {
    "min_tokens": "Minimum number of output tokens.",
    "typical_p": "Sample from the tokens whose surprise is closest to the expected one, up to this probability.",
    "presence_penalty": "Penalty on the logit of each token that the output already has.",
    "frequency_penalty": "Penalty on the logit of a token for each time that the output already has it.",
    "logit_bias": "Addend for the logit of a token id, or of each token of a text, as TOKEN=ADDEND.",
    "stop_token_ids": "Token id that ends the output.",
    "include_stop_str_in_output": "Print the `--stop` text that ended the output, too.",
    "ignore_eos": "Continue after the model's end token. Default: only under a sandboxed controller.",
    "skip_special_tokens": "Omit the texts of special tokens.",
    "watermark": "Write a green-list watermark.",
    "top_n_sigma": "Exclude tokens more than this many standard deviations below the largest logit.",
    "xtc_probability": "XTC: probability of excluding the most likely tokens except the least likely one of them.",
    "xtc_threshold": "XTC: minimum probability of the tokens to exclude.",
    "dynatemp_range": "Range by which the temperature falls and rises with the entropy.",
    "dynatemp_exponent": "Exponent of the entropy for `--dynatemp-range`.",
    "mirostat": "Mirostat version: 2 for Mirostat 2.0, 0 for none.",
    "mirostat_tau": "Mirostat: target surprise in bits.",
    "mirostat_eta": "Mirostat: learning rate.",
    "dry_multiplier": "DRY: penalty on a token that would continue a repetition.",
    "dry_base": "DRY: factor of the penalty for each further token of a repetition.",
    "dry_allowed_length": "DRY: length of the longest repetition without a penalty.",
    "dry_penalty_last_n": "DRY: number of last tokens to search; -1 for all.",
    "dry_sequence_breakers": "DRY: text across which repetitions do not count.",
    "bad_words": "Text that is never completed.",
    "banned_phrases": "Text that the output never contains.",
    "allowed_token_ids": "Token id that may be sampled; others may not.",
    "canonical": "Tokens of a constrained text as the tokenizer writes them: `strict`, `prefer` or `off`.",
    "constraint_report": "Measure what constraints and controllers take from the model.",
    "constraint_floor": "Log-probability that a forced text must reach.",
    "on_constraint_floor": "Action on a forced text below the floor: `flag`, `refuse` or `rewind`.",
    "lookahead": "Number of forced tokens after a candidate that count when the candidate is chosen.",
    "aligned": "Maximum number of restarts for a constrained text with the model's own distribution.",
    "token_healing": "Take the last tokens of the prompt back where longer tokens may stand.",
    "describe_constraint": "Say in the last message what form the answer must have.",
    "prediction": "Expected output; its tokens are used as drafts.",
    "probes": "Control vector along which controllers read the hidden states, as NAME or NAME@LAYER.",
    "control_vectors": "Scale of a control vector that `--load-control-vector` names, as NAME=SCALE.",
}


def derived_options(params: type[SamplingParams] = SamplingParams) -> type[Any]:
    """Return a class with a flag for every sampling parameter that has one on the command line."""
    taken = fields_on("cli", params)
    return make_dataclass(
        "DerivedOptions",
        [_option(each, params) for each in fields(params) if each.name in taken],
        frozen=True,
        kw_only=True,
    )


def _option(given: Field[Any], params: type[SamplingParams]) -> tuple[str, Any, Any]:
    """Return name, type and default of the flag for a sampling parameter."""
    kind = _KINDS[str(given.type).removesuffix(" | None")]
    is_list, told = kind in (_TEXTS, _IDS), _TOLD.get(given.name, f"Sampling parameter `{given.name}`.")
    if is_list:
        flag = Parameter(group=FURTHER, help=f"{told} Repeatable.", negative="")
        return given.name, Annotated[kind, flag], field(default=())
    if meanings(params)[given.name].within is not None and given.default is not None:
        told = f"{told} Default: {given.default:g}."
    return given.name, Annotated[kind, Parameter(group=FURTHER, help=told)], field(default=None)


def read_biases(given: tuple[str, ...]) -> dict[int | str, float]:
    """Parse the values of `--logit-bias`. Returns the addend for each token id or text. Raises `InvalidRequest`."""
    found: dict[int | str, float] = {}
    for item in given:
        name, sign, addend = item.rpartition("=")
        try:
            found[int(name) if name.isascii() and name.isdigit() else name] = float(addend)
        except ValueError:
            sign = ""
        if not sign or not name:
            raise InvalidRequest(
                f"--logit-bias is {short_repr(item)}; must be TOKEN=ADDEND, where TOKEN is a token id or a text, and "
                "ADDEND is a number",
                "logit_bias",
            )
    return found


def read_scales(given: tuple[str, ...]) -> dict[str, float]:
    """Parse the values of `--control-vectors`. Returns the scale for each name. Raises `InvalidRequest`."""
    found: dict[str, float] = {}
    for item in given:
        name, _, scale = item.rpartition("=")
        try:
            found[name] = float(scale)
        except ValueError:
            name = ""
        if not name:
            raise InvalidRequest(
                f"--control-vectors: got {short_repr(item)}; must be NAME=SCALE, such as polite=0.5", "control_vectors"
            )
    return found
