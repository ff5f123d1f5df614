"""Settings of a model and of the engine around it, as plain checked values.

Front-ends (command line, environment, `LLM`) fill these in; nothing here loads or computes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bridle.errors import InvalidRequest

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint to load, and how.

    `model` is a folder, a Hugging Face hub id, or `demo`. `dtype` `auto` is float32 on a CPU and the
    checkpoint's own on a GPU. `kv_memory` bounds the KV cache in bytes (None: a share of what is free, of which
    `max_kv_memory` is the most).
    """

    model: str = "demo"
    revision: str | None = None
    tokenizer: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    kernel: str = "auto"
    quantization: Literal["none", "int8"] = "none"
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_memory: int | None = None
    max_kv_memory: int | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "num_blocks", "kv_memory", "max_kv_memory", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; must be at least 1", name)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of scheduling. None takes the backend's suggestion.

    `max_waiting` bounds the queue of requests not yet running. A sequence may be rewound, put to wait or fork for
    as long as it spends at most `max_draws_factor` times its `max_tokens` (plus a small constant) in draws and
    `max_idle_steps` steps in a row without progress; a request all of whose controllers do nothing, `max_noops` times
    in a row, is given up. `max_forks` bounds the outputs of one request.
    `step_timeout` is how long a step waits for controllers once its forward pass is done, in seconds.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_waiting: int = 4096
    enable_prefix_caching: bool = True
    max_forks: int = 64
    max_draws_factor: int = 8
    max_idle_steps: int = 10_000
    max_noops: int = 1_000
    step_timeout: float = 0.025

    def __post_init__(self) -> None:
        names = ("max_num_batched_tokens", "max_num_seqs", "max_waiting", "max_forks", "max_idle_steps", "max_noops")
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; must be at least 1", name)
