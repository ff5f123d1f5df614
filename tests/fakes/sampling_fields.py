"""A value off its default for each sampling field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridle.sampling_values import Watermark

#: For each field a value that is not its default.
OTHER: Mapping[str, Any] = {
    "n": 2,
    "max_tokens": 7,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 4,
    "min_p": 0.125,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.5},
    "seed": 11,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 0,
    "logprobs_mode": "processed",
    "prompt_logprobs": 2,
    "prompt_logprobs_start": 1,
    "skip_special_tokens": False,
    "watermark": Watermark(0.25, 3.0),
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "mirostat": 2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.25,
    "dry_multiplier": 0.75,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": (";",),
    "dry_breaker_ids": (4, 9),
    "bad_words": ("no",),
    "banned_phrases": ("as an AI",),
    "allowed_token_ids": (4, 9),
    "bias_texts": (("so", 1.5),),
    "bad_words_ids": ((4, 9), (3,)),
    "speculate": 4,
    "prediction": "so",
    "prediction_ids": (3, 4),
    "canonical": "prefer",
    "constraint_report": True,
    "constraint_floor": -3.0,
    "on_constraint_floor": "rewind",
    "lookahead": 8,
    "token_healing": True,
    "describe_constraint": True,
}
