"""Names of vLLM's Python API and their equivalents in bridle: the calls that bridle's errors name, classes, and
keywords that are the same."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol
from bridle.compat.vllm_calls import VLLM_CALLS
from dev.compat.libraries import words

_CLASSES: tuple[LibrarySymbol, ...] = (
    words("vLLM", "LLM", "a folder, a hub id or a GGUF file", exports="LLM"),
    words("vLLM", "SamplingParams", "or its fields as keywords", exports="SamplingParams"),
    words(
        "vLLM",
        "GuidedDecodingParams",
        "its fields are keywords",
        keywords="regex json_schema choice grammar constraint",
    ),
    words("vLLM", "PoolingParams", "its fields are keywords: `dimensions=`, `normalize=`", members="embed"),
    words("vLLM", "LoRARequest PromptAdapterRequest", "by name", members="load_adapter", keywords="adapter"),
)
#: Keywords that bridle's methods have as well.
_SAME: tuple[LibrarySymbol, ...] = (
    words("vLLM", "prompts=", "a text, token ids, or a list of them", members="generate"),
    words("vLLM", "messages= tools=", members="chat"),
    words("vLLM", "sampling_params=", "its fields are keywords, too", members="generate chat"),
    words("vLLM", "use_tqdm=", members="generate"),
    words("vLLM", "multi_modal_data=", "pictures", members="generate"),
    words(
        "vLLM", "add_generation_prompt= chat_template= chat_template_kwargs= continue_final_message=", members="chat"
    ),
    words("vLLM", "truncate_prompt_tokens=", members="embed score classify"),
    words("vLLM", "priority=", "one number for the call", keywords="priority"),
)

VLLM: tuple[LibrarySymbol, ...] = (*_CLASSES, *VLLM_CALLS, *_SAME)
