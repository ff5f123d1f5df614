"""The settings of continuous batching: configured values, or the backend's defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from bridle.config import EngineConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.errors import InvalidRequest

#: Number of queued sequences per decoding sequence that admits prompts: if prompts are computed whole, and if the
#: operator set `max_waiting_tokens`.
_WHOLE_RATIO, _TOLD_RATIO = 0.3, 1.2
_WAITING_STEPS = 20


@dataclass(frozen=True, slots=True)
class Batching:
    """Limits of a step, rules for admitting queued prompts to a step, and limits of requests.

    `max_step_tokens` limits a whole step; the other names are those of `EngineConfig`.
    """

    max_step_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int
    max_input_tokens: int
    max_total_tokens: int
    waiting_served_ratio: float
    max_waiting_tokens: int
    chunked_prefill: bool

    @classmethod
    @lru_cache(maxsize=64)  # called for each request
    def of(cls, config: EngineConfig, info: ExecutorInfo) -> Batching:
        """Return the values of `config`, with the backend's defaults. Raises `InvalidRequest` that names values which
        contradict each other."""
        size = config.max_num_seqs or info.max_num_seqs
        in_chunks = config.chunked_prefill and info.task == "generate"  # a pooling model computes a text in one step
        prefill = _prefill_tokens(config, info)
        total = _total_tokens(config, info)
        batching = cls(
            max_step_tokens=config.max_num_batched_tokens or prefill + size,
            max_batch_prefill_tokens=prefill,
            max_batch_total_tokens=_num_blocks(config, info) * info.block_size,
            max_batch_size=size,
            max_input_tokens=config.max_input_tokens or (total if in_chunks else min(total, prefill)),
            max_total_tokens=total,
            waiting_served_ratio=_ratio(config),
            max_waiting_tokens=_WAITING_STEPS if config.max_waiting_tokens is None else config.max_waiting_tokens,
            chunked_prefill=in_chunks,
        )
        batching._check(config)
        return batching

    def limit(self, info: ExecutorInfo) -> ExecutorInfo:
        """Return the backend's info, limited by the batching settings. Applying the limits twice changes nothing."""
        is_full = self.max_total_tokens == self.max_batch_total_tokens  # in that case the context is not the limit
        return replace(
            info,
            num_blocks=self.max_batch_total_tokens // info.block_size,
            max_model_len=info.max_model_len if is_full else self.max_total_tokens,
            max_num_batched_tokens=self.max_batch_prefill_tokens,
            max_num_seqs=self.max_batch_size,
        )

    def _check(self, config: EngineConfig) -> None:
        if config.max_input_tokens is not None and self.max_input_tokens >= self.max_total_tokens:
            raise InvalidRequest(
                f"max_input_tokens is {self.max_input_tokens}; must be less than max_total_tokens "
                f"({self.max_total_tokens}), because an output has at least one token",
                "max_input_tokens",
            )
        if self.max_batch_prefill_tokens > self.max_step_tokens:
            raise InvalidRequest(
                f"max_batch_prefill_tokens is {self.max_batch_prefill_tokens}, but a step has at most "
                f"{self.max_step_tokens} tokens (max_num_batched_tokens): raise max_num_batched_tokens, or leave "
                "max_batch_prefill_tokens out",
                "max_batch_prefill_tokens",
            )
        if not self.chunked_prefill and self.max_input_tokens > self.max_batch_prefill_tokens:
            raise InvalidRequest(
                f"max_input_tokens is {self.max_input_tokens}, but each prompt is computed in one step of at most "
                f"{self.max_batch_prefill_tokens} tokens (max_batch_prefill_tokens): raise max_batch_prefill_tokens, "
                "or allow chunked prefill",
                "max_input_tokens",
            )


def _prefill_tokens(config: EngineConfig, info: ExecutorInfo) -> int:
    if config.max_batch_prefill_tokens is not None:
        return config.max_batch_prefill_tokens
    tokens = config.max_num_batched_tokens or info.max_num_batched_tokens
    return tokens if config.chunked_prefill else max(tokens, config.max_input_tokens or 0)


def _num_blocks(config: EngineConfig, info: ExecutorInfo) -> int:
    if config.max_batch_total_tokens is None:
        return info.num_blocks
    wanted = -(-config.max_batch_total_tokens // info.block_size)
    if wanted > info.num_blocks:
        raise InvalidRequest(
            f"max_batch_total_tokens is {config.max_batch_total_tokens}, but the KV cache holds only "
            f"{info.num_blocks * info.block_size} tokens",
            "max_batch_total_tokens",
        )
    return wanted


def _total_tokens(config: EngineConfig, info: ExecutorInfo) -> int:
    """Return the maximum length of a sequence: the configured length if the model and the KV cache can hold it, else an
    error. By default, the maximum is the longest sequence that the model and the KV cache can hold."""
    room = _num_blocks(config, info) * info.block_size
    wanted = config.max_total_tokens
    if wanted is None:
        return min(info.max_model_len, room)
    if wanted > info.max_model_len:
        raise InvalidRequest(
            f"max_total_tokens is {wanted}; the model's context has {info.max_model_len} tokens", "max_total_tokens"
        )
    if wanted > room:
        raise InvalidRequest(
            f"max_total_tokens is {wanted}, but the KV cache holds only {room} tokens. Lower max_total_tokens, or "
            "raise max_batch_total_tokens or kv_memory",
            "max_total_tokens",
        )
    return wanted


def _ratio(config: EngineConfig) -> float:
    """Return the default of `waiting_served_ratio`. With chunked prefill, a prompt hardly disturbs decoding. So a
    prompt waits only if the operator set a number of steps to wait."""
    if config.waiting_served_ratio is not None:
        return config.waiting_served_ratio
    if config.max_waiting_tokens is not None:
        return _TOLD_RATIO
    return 0.0 if config.chunked_prefill else _WHOLE_RATIO
