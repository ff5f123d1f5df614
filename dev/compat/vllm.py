"""Names of vLLM's Python API and their equivalents in bridle. They are the calls that bridle's errors name, classes,
and keywords that are the same."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol
from bridle.compat.vllm_calls import VLLM_CALLS
from dev.compat.libraries import words

_CLASSES: tuple[LibrarySymbol, ...] = (
    words("vLLM", "LLM", "the model is a folder, a hub id or a GGUF file", exports="LLM"),
    words("vLLM", "SamplingParams", "calls also accept the class's fields as keywords", exports="SamplingParams"),
    words(
        "vLLM",
        "GuidedDecodingParams",
        "calls accept the class's fields as keywords",
        keywords="regex json_schema choice grammar constraint",
    ),
    words(
        "vLLM",
        "PoolingParams",
        "calls accept the class's fields as keywords: `dimensions=`, `normalize=`",
        members="embed",
    ),
    words(
        "vLLM",
        "LoRARequest PromptAdapterRequest",
        "a call names the adapter",
        members="load_adapter",
        keywords="adapter",
    ),
)
#: Keywords that bridle's methods have as well.
_SAME: tuple[LibrarySymbol, ...] = (
    words("vLLM", "prompts=", "`prompts` is a text, token ids, or a list of these", members="generate"),
    words("vLLM", "messages= tools=", members="chat"),
    words("vLLM", "sampling_params=", "calls also accept the class's fields as keywords", members="generate chat"),
    words("vLLM", "use_tqdm=", members="generate"),
    words("vLLM", "multi_modal_data=", "docs/pictures.md shows how to pass images", members="generate"),
    words(
        "vLLM", "add_generation_prompt= chat_template= chat_template_kwargs= continue_final_message=", members="chat"
    ),
    words("vLLM", "truncate_prompt_tokens=", members="embed score classify"),
    words("vLLM", "priority=", "one priority applies to the whole call", keywords="priority"),
)

VLLM: tuple[LibrarySymbol, ...] = (*_CLASSES, *VLLM_CALLS, *_SAME)
