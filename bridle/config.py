"""Settings of a model and its engine, as plain checked values.

Front ends (command line, environment, `LLM`) fill in these settings; this module loads and computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

from bridle.errors import InvalidRequest

Quantization = Literal["none", "auto", "int8", "q8_0", "q4_0", "fp8"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "int8"]

#: Default limits of the memory for adapters in bytes, on the device and on the host.
ADAPTER_MEMORY = 1 << 30
ADAPTER_HOST_MEMORY = 4 << 30

#: By default, a step without chunked prefill has room for a prompt of this many tokens.
WHOLE_PROMPT_TOKENS = 1024

_MODEL_COUNTS = (
    "max_model_len",
    "block_size",
    "num_blocks",
    "kv_memory",
    "kv_tokens",
    "max_kv_memory",
    "reserved_memory",
    "num_sharers",
    "step_tokens",
    "step_seqs",
    "num_threads",
)
_MODEL_WORDS: dict[str, tuple[str, ...]] = {
    "backend": ("torch", "llamacpp"),
    "dtype": get_args(DType),
    "kv_cache_dtype": get_args(KVCacheDType),
    "generation_config": ("auto", "none"),
    "tool_prompt": ("describe", "refuse"),
}
_ENGINE_COUNTS = (
    "max_num_batched_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_num_seqs",
    "max_input_tokens",
    "max_total_tokens",
    "max_waiting",
    "max_forks",
    "max_idle_steps",
    "max_noops",
    "max_step_adapters",
    "adapter_memory",
    "adapter_host_memory",
    "kv_store_bytes",
)
#: Formats of KV in a store.
KV_STORE_FORMATS = ("exact", "int8")
#: Default for parked conversations: maximum share of the KV cache, and number of seconds.
PARKED_SHARE, PARK_SECONDS = 0.25, 300.0
#: Default maximum share of the parked KV that a user's retained prefixes take.
RETAINED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The checkpoint to load, and the settings for loading it.

    `model` is a folder, a GGUF file, a Hugging Face hub id, or `demo`. `mmproj` is the GGUF file with the vision tower
    of a GGUF model (None: such a file next to the model, if there is one). `backend` names the backend that computes
    the model. `dtype` `auto` is float32 on a CPU, and the checkpoint's own type on a GPU. `kv_cache_dtype` is the type
    of keys and values on a CPU: `auto` is `dtype`; `int8` has one scale for each head of a token. The size of the KV
    cache is `num_blocks` blocks, `kv_tokens` tokens, or `kv_memory` bytes. If none of `num_blocks`, `kv_tokens` and
    `kv_memory` is set, the KV cache gets the memory that the largest step of `warm_up` leaves free. The KV cache takes
    at most `max_kv_memory` bytes; `num_sharers` processes share the device's memory. The KV cache leaves
    `reserved_memory` bytes of device memory free for adapters that are loaded later. With `reserved_memory` 0, no
    adapters are loaded later, and CUDA graphs are made without adapters. The largest step has `step_tokens` prompt
    tokens and `step_seqs` sequences (None: the default of the device). With `generation_config` `auto`, the
    checkpoint's file of that name sets the sampling parameters that a request leaves out. `draft_model` is a smaller
    checkpoint with the same vocabulary. The draft model takes part of the KV cache's memory. If a request names an
    image by its address, the image is fetched only from `image_hosts`. `control_vectors` are files of control vectors
    that requests may scale, each as NAME=FILE. With `enforce_eager`, a GPU computes all steps without CUDA graphs. By
    default, only long steps run without CUDA graphs. `tool_format` and `reasoning_format` name the formats of tool
    calls and reasoning (`auto`: detected from the chat template). With `parse_special_text`, text in messages that
    spells a special token becomes that token. Without `bare_calls`, a tool call without its markup is read as text. If
    the chat template cannot show tools, `tool_prompt` decides whether they are described in the prompt or refused. When
    the reasoning budget ends, `thinking_budget_message` is appended and the model continues after it. After
    `max_repeated_calls` equal tool calls in a row with equal results, the model is offered no tools (0: no limit).
    """

    model: str = "demo"
    draft_model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    mmproj: str | None = None
    backend: Literal["torch", "llamacpp"] = "torch"
    dtype: DType = "auto"
    device: str = "auto"
    kernel: str = "auto"
    adapter_kernel: str = "auto"
    enforce_eager: bool = False
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_memory: int | None = None
    kv_tokens: int | None = None
    max_kv_memory: int | None = None
    reserved_memory: int | None = None
    num_sharers: int = 1
    step_tokens: int | None = None
    step_seqs: int | None = None
    warm_up: bool = True
    num_threads: int | None = None
    generation_config: Literal["auto", "none"] = "auto"
    image_hosts: tuple[str, ...] = ()
    control_vectors: tuple[str, ...] = ()
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    parse_special_text: bool = False
    bare_calls: bool = True
    tool_prompt: Literal["describe", "refuse"] = "describe"
    thinking_budget_message: str = ""
    max_repeated_calls: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, _MODEL_COUNTS)
        for name, words in _MODEL_WORDS.items():
            if getattr(self, name) not in words:
                known = ", ".join(map(str, words))
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; must be one of {known}", name)
        if self.mmproj is not None and self.backend == "llamacpp":
            raise InvalidRequest("mmproj: got a file, but backend 'llamacpp' reads no images; use 'torch'", "mmproj")
        if self.max_repeated_calls < 0:
            raise InvalidRequest(
                f"max_repeated_calls is {self.max_repeated_calls}; must be at least 0", "max_repeated_calls"
            )

    def sized_for(self, engine: EngineConfig) -> ModelConfig:
        """Return a copy of the model settings with the memory that an engine with the given limits needs. Values that
        are already set are not changed."""
        is_sized = self.num_blocks is not None or self.kv_memory is not None
        step_tokens = engine.max_batch_prefill_tokens or engine.max_num_batched_tokens
        if not engine.chunked_prefill and engine.max_batch_prefill_tokens is None:
            step_tokens = max(step_tokens or WHOLE_PROMPT_TOKENS, engine.max_input_tokens or 0)
        return replace(
            self,
            max_model_len=self.max_model_len or engine.max_total_tokens,
            kv_tokens=self.kv_tokens or (None if is_sized else engine.max_batch_total_tokens),
            step_tokens=self.step_tokens or step_tokens,
            step_seqs=self.step_seqs or engine.max_num_seqs,
        )


def _check_positive(config: ModelConfig | EngineConfig, names: tuple[str, ...]) -> None:
    for name in names:
        value, least = getattr(config, name), 0 if name == "reserved_memory" else 1
        if value is not None and value < least:
            raise InvalidRequest(f"{name} is {value}; must be at least {least}", name)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the scheduler: the size of a step, the waiting time of prompts, and the length of requests. With None,
    a limit has the backend's default. `bridle.engine.scheduling.batching` has the defaults; docs/batching.md explains
    the trade-offs.

    A step computes at most `max_num_batched_tokens` tokens, of which `max_batch_prefill_tokens` may belong to prompts.
    A step computes at most `max_num_seqs` sequences, which hold at most `max_batch_total_tokens` tokens of KV together.
    While sequences decode, queued prompts wait. Queued prompts get part of a step when `waiting_served_ratio` times as
    many prompts are queued as sequences decode. Queued prompts also get part of a step `max_waiting_tokens` steps after
    the last prompts were computed. Without `chunked_prefill`, each prompt is computed as a whole, in a step without
    decoding. A prompt has at most `max_input_tokens` tokens; prompt and output together have at most
    `max_total_tokens`.

    `max_waiting` limits the number of queued requests. Rollbacks, suspensions and forks of a sequence have two limits.
    A sequence samples at most `max_draws_factor` times its `max_tokens` tokens (plus a small constant). A sequence
    spends at most `max_idle_steps` steps in a row without progress. A request ends with an error if all of its
    controllers answer with a no-op `max_noops` times in a row. `max_forks` limits the number of outputs of one request.
    A step waits at most `step_timeout` seconds for controllers after its forward pass. One level of priority equals
    `priority_seconds` of waiting: a request that has waited longer by this time overtakes a request one level higher.

    A step computes with at most `max_step_adapters` adapters; if requests need more, the adapters take turns. Adapters
    in use take at most `adapter_memory` bytes on the model's device. Loaded adapters take at most `adapter_host_memory`
    bytes on the host. By default (None), adapters take at most 1 GiB on the device and 4 GiB on the host. If memory is
    reserved for adapters, this device limit is at most an eighth of the free memory.

    After a tool call, the KV of a conversation is retained for `park_seconds`: it is evicted last. Retained KV takes at
    most `park_memory` bytes of the KV cache (None: a quarter of the cache; 0: no KV is retained). Within `park_memory`,
    one user may retain `max_retained` prefixes and caches with `max_retained_tokens` tokens (None: half of the retained
    tokens).

    The folder `kv_store` keeps evicted blocks of the KV cache, and the blocks that are in memory when the engine
    closes. `kv_store` `auto` is a folder in the user's cache, if the model can use such a folder; None keeps no blocks.
    The store's folder takes at most `kv_store_bytes` bytes (None: 8 GiB, or a tenth of the free disk if that is less).
    Blocks are encrypted with the key in the file `kv_store_key`, if one is given. `kv_store_format` is `exact`, or
    `int8`, which takes less disk space and makes the KV approximate. Blocks of a GPU first go to the host's memory, at
    most `kv_host_bytes` bytes (0: directly to disk).

    Ids without a token in the tokenizer are never sampled, unless `unnamed_ids` allows it.

    `speculate` is the number of draft tokens for requests that set none: 0 for none, -1 for the number that gives the
    highest speed. If `speculate` is None, it is -1 with a draft model, else 0. With `allow_probes`, controllers may
    read the projections of hidden states on control vectors.
    """

    max_num_batched_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_num_seqs: int | None = None
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None
    chunked_prefill: bool = True
    max_waiting: int = 4096
    enable_prefix_caching: bool = True
    max_forks: int = 64
    max_draws_factor: int = 8
    max_idle_steps: int = 10_000
    max_noops: int = 1_000
    step_timeout: float = 0.025
    priority_seconds: float = 10.0
    max_step_adapters: int = 64
    adapter_memory: int | None = None
    adapter_host_memory: int | None = None
    speculate: int | None = None
    allow_probes: bool = False
    park_memory: int | None = None
    park_seconds: float = PARK_SECONDS
    max_retained: int = 64
    max_retained_tokens: int | None = None
    kv_store: str | None = None
    kv_store_bytes: int | None = None
    kv_store_key: str | None = None
    kv_store_format: str = "exact"
    kv_host_bytes: int = 0
    unnamed_ids: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, _ENGINE_COUNTS)
        if self.park_memory is not None and self.park_memory < 0:
            raise InvalidRequest(f"park_memory is {self.park_memory}; must be at least 0", "park_memory")
        for name, least in (("max_retained", 0), ("max_retained_tokens", 1), ("kv_host_bytes", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise InvalidRequest(f"{name} is {value}; must be at least {least}", name)
        if self.kv_store_format not in KV_STORE_FORMATS:
            raise InvalidRequest(
                f"kv_store_format is {self.kv_store_format!r}; must be {' or '.join(KV_STORE_FORMATS)}",
                "kv_store_format",
            )
        if not 0 <= self.park_seconds <= 86_400:
            raise InvalidRequest(
                f"park_seconds is {self.park_seconds}; must be at least 0 and at most 86400", "park_seconds"
            )
        ratio, steps = self.waiting_served_ratio, self.max_waiting_tokens
        if ratio is not None and not 0 <= ratio < inf:
            raise InvalidRequest(f"waiting_served_ratio is {ratio}; must be at least 0", "waiting_served_ratio")
        if steps is not None and steps < 0:
            raise InvalidRequest(f"max_waiting_tokens is {steps}; must be at least 0", "max_waiting_tokens")
        if not 0 < self.priority_seconds <= 86_400:
            raise InvalidRequest(
                f"priority_seconds is {self.priority_seconds}; must be more than 0 and at most 86400",
                "priority_seconds",
            )
