"""Reads an adapter_config.json. If the file has a setting that bridle does not support, the error names the setting.

New versions of PEFT add new fields. An unknown field is ignored only if it is empty (null, false, an empty list). If
bridle ignored other unknown fields, it might apply an adapter differently than the adapter was trained, without an
error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bridle.errors import AdapterRefused
from bridle.safe_repr import short_repr

MAX_RANK = 512
#: Maximum number of patterns of ranks and alphas in one adapter.
MAX_PATTERNS = 10_000
_MAX_PATTERN_CHARS = 256
_MAX_REPEATS = 4

#: Fields that no longer matter after training, or that repeat information in the names of the weights.
_SILENT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
#: Fields that must be empty, each with its meaning otherwise.
_REFUSED = {
    "use_dora": "DoRA scales the base weights too",
    "modules_to_save": "it replaces whole layers of the model",
    "lora_bias": "it has biases of its own",
    "trainable_token_indices": "it has trained embeddings",
    "layer_replication": "it repeats layers of the model",
    "target_parameters": "it changes parameters outside of linear layers",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt",
    "use_qalora": "QALoRA pools its inputs",
    "arrow_config": "Arrow routes between adapters",
    "use_bdlora": "block-diagonal LoRA shapes its weights differently",
}
#: Values of `init_lora_weights` for which the base weights are still the model's own.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


class _Fields(msgspec.Struct):
    """The fields of adapter_config.json that are read, with their types."""

    peft_type: str
    r: int
    lora_alpha: float = 8
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The term `scale * B(A(x))` that an adapter adds to one linear layer. A maps `in_features` to `rank` values, and B
    maps these `rank` values to `out_features`."""

    rank: int
    in_features: int
    out_features: int
    scale: float


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The supported configuration of an adapter."""

    rank: int
    alpha: float
    use_rslora: bool
    is_transposed: bool  # trained for layers that keep their weights as [in, out]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Return the adapter's rank at the layer called `module`."""
        return int(_first_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor by which B's result is multiplied at the layer called `module`."""
        rank = self.rank_of(module)
        alpha = float(_first_match(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(data: bytes) -> PeftConfig:
    """Return the configuration in an adapter_config.json. Raises `AdapterRefused`, naming field and value."""
    try:
        raw = msgspec.json.decode(data)
        if not isinstance(raw, dict):
            raise AdapterRefused(f"adapter_config.json holds a JSON {type(raw).__name__}, not an object", "source")
        if raw.get("peft_type") != "LORA":
            raise AdapterRefused(f"peft_type is {short_repr(raw.get('peft_type'))}; only 'LORA' is supported", "source")
        fields = msgspec.convert(raw, _Fields)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise AdapterRefused(f"adapter_config.json is not a PEFT configuration: {error}", "source") from None
    _check_meaning(raw, fields)
    return PeftConfig(
        rank=fields.r,
        alpha=fields.lora_alpha,
        use_rslora=fields.use_rslora,
        is_transposed=fields.fan_in_fan_out,
        rank_pattern=fields.rank_pattern or {},
        alpha_pattern=fields.alpha_pattern or {},
    )


def _check_meaning(raw: dict[str, Any], fields: _Fields) -> None:
    for name, value in raw.items():
        if not value or name in _SILENT or name in _Fields.__struct_fields__:
            continue
        reason = _REFUSED.get(name, "a field that is not known here may change what the adapter means")
        raise AdapterRefused(f"{short_repr(name)} is {short_repr(value)}: {reason}, which is not supported", "source")
    if fields.bias != "none":
        raise AdapterRefused(f"bias is {short_repr(fields.bias)}; adapters with biases are not supported", "source")
    if fields.init_lora_weights not in _PLAIN_STARTS:
        raise AdapterRefused(
            f"init_lora_weights is {short_repr(fields.init_lora_weights)}: this changed the base weights; convert the "
            "adapter "
            "to plain LoRA while saving it",
            "source",
        )
    ranks = (fields.r, *(fields.rank_pattern or {}).values())
    for rank in ranks:
        if not 1 <= rank <= MAX_RANK:
            raise AdapterRefused(f"the rank is {rank}; must be from 1 to {MAX_RANK}", "source")
    for alpha in (fields.lora_alpha, *(fields.alpha_pattern or {}).values()):
        if not math.isfinite(alpha):
            raise AdapterRefused(f"lora_alpha is {alpha}; must be a finite number", "source")
    for pattern in (fields.rank_pattern, fields.alpha_pattern):
        _check_patterns(pattern or {})


# -- patterns ----------------------------------------------------------------------------------------------------

#: The pieces that a pattern may consist of. A pattern is a regular expression from an untrusted source, so no piece may
#: run for long.
_PIECE = re.compile(r"[\w\-.|()^$]|\\\.|\\d\+?", re.ASCII)


def _check_patterns(patterns: Mapping[str, Any]) -> None:
    if len(patterns) > MAX_PATTERNS:
        raise AdapterRefused(f"there are {len(patterns)} rank and alpha patterns; at most {MAX_PATTERNS}", "source")
    for pattern in patterns:
        is_plain = len(pattern) <= _MAX_PATTERN_CHARS and not _PIECE.sub("", pattern)
        if not is_plain or pattern.count("+") > _MAX_REPEATS or not _compiles(pattern):
            raise AdapterRefused(
                f"the pattern {short_repr(pattern)} of ranks or alphas may contain only letters, digits, _ - . | ( ) "
                "^ $ "
                "and \\. \\d \\d+",
                "source",
            )


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _first_match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the module's name, or that matches a part of the name after a
    dot, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
