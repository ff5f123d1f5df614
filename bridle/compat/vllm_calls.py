"""Names of vLLM's Python API other than request fields, with their equivalents in bridle. The names are methods of
vLLM's `LLM`, keywords of these methods, and settings that vLLM's server does not have as flags. The class `bridle.LLM`
uses this table in errors about unknown names."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.schema import LibrarySymbol

_RUNNING = "use traces of requests, `LLM.statistics` or `bridle top`, which show the work of the engine"
_ROOM = "the server drops cached KV when it needs the memory"
_WHOLE = "close the model, and load it again"
_BEAMS = "calls accept these fields as keywords: `beam_width=`, `max_tokens=`, `length_penalty=`"
_PREPARED = "the checkpoint determines the preprocessing of prompts and images"


def _words(names: str, why: str = "", *, members: str = "", keywords: str = "") -> LibrarySymbol:
    return LibrarySymbol("vLLM", ", ".join(names.split()), tuple(keywords.split()), tuple(members.split()), why=why)


VLLM_CALLS: tuple[LibrarySymbol, ...] = (
    # Methods.
    _words("LLM.generate", members="generate"),
    _words("LLM.chat", members="chat"),
    _words("LLM.embed LLM.encode", members="embed"),
    _words("LLM.classify", members="classify"),
    _words(
        "LLM.reward", "the model is a classifier with one label, without rewards for single tokens", members="classify"
    ),
    _words(
        "LLM.score", "the call scores pairs of texts, and returns log-probabilities of single texts", members="score"
    ),
    _words("LLM.get_tokenizer", members="tokenizer"),
    _words("LLM.set_tokenizer", "`LLM(tokenizer=...)` sets another tokenizer"),
    _words(
        "LLM.get_default_sampling_params",
        "the folder's recommended values are used automatically",
        members="chat_sampling",
    ),
    _words("LLM.preprocess_chat", members="chat_prompt"),
    _words("LLM.enqueue", "await the call, or make it in another thread", members="generate_async"),
    _words("LLM.enqueue_chat", "await the call, or make it in another thread", members="chat_async"),
    _words("LLM.wait_for_completion", "awaiting the call returns the outputs", members="generate_async chat_async"),
    _words("LLM.get_metrics", "a server has the route /metrics", members="statistics"),
    _words("LLM.from_engine_args", "pass the settings to `LLM(...)`"),
    _words("LLM.get_engine_class", "bridle has only its own engine"),
    _words("LLM.start_profile LLM.stop_profile LLM.collective_rpc LLM.apply_model", _RUNNING),
    _words("LLM.reset_prefix_cache LLM.reset_mm_cache LLM.release_kv_cache_memory", _ROOM),
    _words("LLM.sleep LLM.wake_up", _WHOLE, members="close"),
    _words("LLM.get_world_size", "an `LLM` is one process with one device"),
    _words(
        "LLM.init_weight_transfer_engine LLM.shutdown_weight_transfer_engine LLM.start_weight_update "
        "LLM.start_draft_weight_update LLM.update_weights LLM.finish_weight_update LLM.update_weight_version "
        "LLM.get_weight_version",
        reasons.TRAINING,
    ),
    # Keywords of methods.
    _words(
        "lora_request=", "name an adapter; `LLM(adapters=...)` loads it", keywords="adapter", members="load_adapter"
    ),
    _words("prompt_adapter_request=", "bridle supports LoRA adapters, but not tuned prompts", keywords="adapter"),
    _words("prompt_token_ids=", "`prompts` also accepts lists of token ids", members="generate"),
    _words("guided_options_request=", keywords="regex json_schema choice grammar constraint"),
    _words("params=", _BEAMS, members="beam_search"),
    _words("concurrency_limit=", "the engine searches all prompts in one batch", members="beam_search"),
    _words("pooling_params=", "calls accept these fields as keywords: `dimensions=`, `normalize=`", members="embed"),
    _words("pooling_task=", reasons.POOLED),
    _words(
        "tokenization_kwargs=", "pass token ids; only requests to servers have `add_special_tokens`", members="generate"
    ),
    _words("mm_processor_kwargs= chat_template_content_format=", _PREPARED),
    # Settings.
    _words("LLM(model_weights=)", "weights and configuration are in one folder"),
    _words("LLM(enable_mm_processor_stats=)", reasons.METRICS),
    _words("LLM(mamba_config=)", reasons.MAMBA),
)

#: The advice for each name, as errors show it.
_ADVICE = {name: word.advice for word in VLLM_CALLS for name in word.name.split(", ")}


def of_keyword(name: str) -> str:
    """Return advice for a keyword of vLLM's calls, or an empty string."""
    return _ADVICE.get(f"{name}=", "")


def of_method(name: str) -> str:
    """Return advice for a method of vLLM's `LLM`, or an empty string."""
    return _ADVICE.get(f"LLM.{name}", "")


def of_setting(name: str) -> str:
    """Return advice for a setting of vLLM's `LLM` that vLLM's server does not have as a flag, or an empty string."""
    return _ADVICE.get(f"LLM({name}=)", "")
