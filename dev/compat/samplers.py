"""Samplers, penalties and token bans of other systems, by their request fields.

The equivalent of each field in bridle is in `bridle.compat.request_fields` and not repeated here. `example` is a
request body in which the sampler changes the generated text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bridle.compat.schema import System, systems_of


@dataclass(frozen=True, slots=True)
class CompatSampler:
    """A sampler: the systems that have it, and their request fields for it."""

    name: str
    systems: tuple[System, ...]
    fields: tuple[str, ...]
    example: dict[str, Any] = field(default_factory=dict)


def _sampler(name: str, systems: str, fields: str, **example: Any) -> CompatSampler:
    return CompatSampler(name, systems_of(systems), tuple(fields.split()), example)


_W = "text-generation-webui"
_ALL = f"OpenAI vLLM SGLang llama.cpp TGI {_W}"

SAMPLERS: tuple[CompatSampler, ...] = (
    _sampler("temperature", f"{_ALL} LMQL", "temperature", temperature=0.0),
    _sampler("seed", _ALL, "seed", seed=12345),
    _sampler("top-p", _ALL, "top_p", top_p=0.05),
    _sampler("top-k", f"vLLM SGLang llama.cpp TGI {_W}", "top_k", top_k=1),
    _sampler("min-p", f"vLLM SGLang llama.cpp {_W}", "min_p", min_p=0.9),
    _sampler("locally typical", f"llama.cpp TGI {_W}", "typical_p", typical_p=0.05),
    _sampler("top-n-sigma", f"llama.cpp {_W}", "top_n_sigma", top_n_sigma=0.1),
    _sampler("XTC", f"llama.cpp {_W}", "xtc_probability xtc_threshold", xtc_probability=1.0, xtc_threshold=0.01),
    _sampler(
        "DRY",
        f"llama.cpp {_W}",
        "dry_multiplier dry_base dry_allowed_length dry_sequence_breakers",
        dry_multiplier=50.0,
        dry_allowed_length=0,
        dry_sequence_breakers=["~"],
    ),
    _sampler("DRY within a window of tokens", "llama.cpp", "dry_penalty_last_n"),
    _sampler(
        "dynamic temperature",
        f"llama.cpp {_W}",
        "dynatemp_exponent dynatemp_range",
        temperature=2.0,
        dynatemp_range=2.0,
    ),
    _sampler("dynamic temperature by lowest and highest value", _W, "dynamic_temperature dynatemp_low dynatemp_high"),
    _sampler("Mirostat 2", f"llama.cpp {_W}", "mirostat mirostat_tau mirostat_eta", mirostat=2, mirostat_tau=0.1),
    _sampler("Mirostat's mode, by another name", _W, "mirostat_mode", mirostat_mode=2, mirostat_tau=0.1),
    _sampler(
        "repetition penalty",
        f"vLLM SGLang llama.cpp TGI {_W}",
        "repetition_penalty repeat_penalty",
        repeat_penalty=50.0,
    ),
    _sampler("presence penalty", f"OpenAI vLLM SGLang llama.cpp {_W}", "presence_penalty", presence_penalty=50.0),
    _sampler("frequency penalty", _ALL, "frequency_penalty", frequency_penalty=50.0),
    _sampler("penalties within a window", f"llama.cpp {_W}", "repeat_last_n repetition_penalty_range penalize_nl"),
    _sampler("logit bias", f"{_ALL} LMQL", "logit_bias", logit_bias={"7": 100}),
    _sampler("banned tokens", _W, "custom_token_bans", custom_token_bans=",".join(map(str, range(3, 60)))),
    _sampler("list of allowed tokens", "vLLM", "allowed_token_ids", allowed_token_ids=[9]),
    _sampler("banned words", "vLLM", "bad_words", bad_words=list("abcdefghij")),
    _sampler("banned phrases", "llama.cpp", "banned_strings", banned_strings=list("abcdefghij")),
    _sampler("minimum number of tokens", "vLLM SGLang TGI", "min_tokens min_new_tokens"),
    _sampler("ignore the end-of-sequence token", "vLLM SGLang llama.cpp", "ignore_eos"),
    _sampler("watermark", "TGI", "watermark"),
    _sampler("watermark by the server's settings", "vLLM", "watermarking"),
    _sampler("beam search", "vLLM TGI", "use_beam_search length_penalty early_stopping"),
    _sampler("beam search by number of beams", f"SGLang TGI {_W}", "beam_width num_beams"),
    _sampler("no repeated n-grams", f"TGI {_W}", "no_repeat_ngram_size"),
    _sampler("repetition ends the output", "vLLM", "repetition_detection"),
    _sampler("tail-free sampling", f"llama.cpp {_W}", "tfs tfs_z"),
    _sampler("top-a", f"llama.cpp {_W}", "top_a"),
    _sampler("adaptive-p", "llama.cpp", "adaptive_target adaptive_decay"),
    _sampler("epsilon and eta cutoffs", _W, "epsilon_cutoff eta_cutoff"),
    _sampler("quadratic smoothing", _W, "smoothing_factor smoothing_curve"),
    _sampler("penalty for tokens that are not in the prompt", _W, "encoder_repetition_penalty"),
    _sampler("contrastive search", _W, "penalty_alpha"),
    _sampler("classifier-free guidance", _W, "guidance_scale negative_prompt"),
    _sampler("order of samplers", f"llama.cpp {_W}", "samplers sampler_priority temperature_last"),
    _sampler("minimum number of tokens that filters keep", "llama.cpp", "min_keep"),
    _sampler(
        "logits processors of the user",
        "vLLM SGLang",
        "logits_processors vllm_xargs custom_logit_processor custom_params",
    ),
)
