"""Loads a `ModelConfig` into an executor over llama.cpp. If the configuration uses a feature that this backend does not
support, the error names the feature."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch

from bridle.cgroups import num_cores
from bridle.config import ModelConfig
from bridle.engine.interfaces import ExecutorInfo, Sampler
from bridle.errors import InvalidRequest, OutOfBlocks, UnsupportedModel
from bridle.gguf import GgufModel
from bridle.gguf.family import GgufFamily
from bridle.gguf.fields import Config
from bridle.gguf.settings import find_family, read_config
from bridle.llamacpp.adapters import LlamaAdapters
from bridle.llamacpp.executor import LlamaExecutor
from bridle.llamacpp.library import MAX_SLOTS, Model, library, require_library
from bridle.llamacpp.slot_states import kv_identity
from bridle.load_progress import Report, silent
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.executor_builder import STEP_TOKENS
from bridle.model.hub_lookup import resolve_model
from bridle.model.kv_budget import CACHED_CONTEXTS, choose_room
from bridle.model.memory import free_memory, show_bytes
from bridle.model.sampler import StandardSampler

_log = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_LEAST_TOKENS = 256
_LEAST_BYTES = 1 << 10


def load_executor(config: ModelConfig, progress: Report | None = None, sampler: Sampler | None = None) -> LlamaExecutor:
    """Load a GGUF model into llama.cpp. Raises `UnsupportedModel`, `InvalidRequest` or `OutOfBlocks`."""
    report = progress or silent
    check_settings(config)
    if config.device == "cuda" and not library().llama_supports_gpu_offload():
        raise InvalidRequest("device is 'cuda', but this build of llama.cpp runs only on CPUs", "device")
    report("finding the model", 0.0)
    folder = resolve_model(config.model, config.revision, lambda share: report("downloading", share))
    checkpoint = inspect_checkpoint(folder)
    source = checkpoint.gguf
    if source is None:
        raise UnsupportedModel(
            f"backend 'llamacpp' reads only GGUF files, and {config.model!r} is not one; `bridle quantize` writes them"
        )
    sizes = _sizes_of(config, source, checkpoint.num_bytes)
    report("reading weights", 0.05)
    model = Model(
        source.path,
        num_cells=sizes.num_cells,
        max_batch=max(sizes.step_tokens, MAX_SLOTS),
        kv_type=sizes.kv_type,
        num_threads=config.num_threads or num_cores(),
        on_gpu=sizes.on_gpu,
    )
    report("ready", 1.0)
    info = _info_of(config, model, sizes, checkpoint.eos_token_ids)
    adapters = LlamaAdapters(model, source, *_known(source))
    identity = partial(kv_identity, checkpoint.folder, sizes.kv_type, sizes.on_gpu)
    return LlamaExecutor(
        info, model, sampler or StandardSampler(), adapters, sizes.num_cells * sizes.cell_bytes, identity
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of the KV cache, which llama.cpp allocates at once, and of a step. A cell of the cache holds one token."""

    kv_type: str
    cell_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    step_tokens: int
    on_gpu: bool

    @property
    def num_cells(self) -> int:
        return self.num_blocks * self.block_size


def _sizes_of(config: ModelConfig, source: GgufModel, weight_bytes: int) -> _Sizes:
    arch = source.text("general.architecture")
    kv_type = "float16" if config.dtype == "auto" else config.dtype
    cell_bytes = _cell_bytes(source, 4 if kv_type == "float32" else 2)
    max_model_len = _longest(config, source.integer(f"{arch}.context_length", 2048, 1))
    block_size = config.block_size or _BLOCK_SIZE
    num_tokens = _num_tokens(config, max_model_len, cell_bytes, block_size, weight_bytes)
    on_gpu = config.device.startswith("cuda")
    step_tokens = config.step_tokens or STEP_TOKENS["cuda" if on_gpu else "cpu"]
    num_blocks = -(-num_tokens // block_size)
    return _Sizes(kv_type, cell_bytes, block_size, num_blocks, max_model_len, step_tokens, on_gpu)


def _info_of(config: ModelConfig, model: Model, sizes: _Sizes, eos_token_ids: tuple[int, ...]) -> ExecutorInfo:
    fits = config.max_model_len is not None or sizes.max_model_len <= sizes.num_cells
    return ExecutorInfo(
        model=config.model,
        vocab_size=model.vocab_size,
        max_model_len=sizes.max_model_len if fits else sizes.num_cells,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        kv="sequences",
        eos_token_ids=eos_token_ids,
        dtype=sizes.kv_type,
        device="cuda" if sizes.on_gpu else "cpu",
        max_num_batched_tokens=sizes.step_tokens,
        max_num_seqs=min(config.step_seqs or model.num_slots // 2, model.num_slots // 2),
        embedding_size=model.hidden_size,
    )


def check_settings(config: ModelConfig) -> None:
    """Raise `InvalidRequest` for a setting that this backend does not support, or `UnsupportedModel` if the extra
    `llamacpp` is not installed."""
    require_library()
    if config.quantization != "none":
        raise InvalidRequest(
            f"backend 'llamacpp' takes no quantization, got {config.quantization!r}: GGUF files are quantized already",
            "quantization",
        )
    if config.draft_model is not None:
        raise InvalidRequest("backend 'llamacpp' takes no draft_model; use backend 'torch'", "draft_model")
    for name in ("kernel", "adapter_kernel", "kv_cache_dtype"):
        if getattr(config, name) != "auto":
            raise InvalidRequest(f"backend 'llamacpp' does not support {name}, got {getattr(config, name)!r}", name)
    if config.enforce_eager:
        raise InvalidRequest("backend 'llamacpp' does not support enforce_eager", "enforce_eager")
    if config.device not in ("auto", "cpu", "cuda"):
        raise InvalidRequest(f"device is {config.device!r}; backend 'llamacpp' supports auto, cpu and cuda", "device")
    if config.step_seqs is not None and config.step_seqs > MAX_SLOTS // 2:
        raise InvalidRequest(
            f"max_num_seqs is {config.step_seqs}; backend 'llamacpp' runs at most {MAX_SLOTS // 2} sequences at once",
            "max_num_seqs",
        )


def _longest(config: ModelConfig, trained: int) -> int:
    if config.max_model_len is not None and config.max_model_len > trained:
        raise InvalidRequest(
            f"max_model_len (or max_total_tokens) is {config.max_model_len}; the model supports at most {trained}",
            "max_model_len",
        )
    return config.max_model_len or trained


def _cell_bytes(source: GgufModel, item_size: int) -> int:
    """Return the maximum bytes of one token in the KV cache."""
    arch = source.text("general.architecture")
    heads = source.integer(f"{arch}.attention.head_count", 1, 0) if _is_plain(source, arch, "head_count") else 64
    if not heads:  # only recurrent states, whose size does not depend on the number of tokens
        return _LEAST_BYTES
    kv_heads = heads
    if _is_plain(source, arch, "head_count_kv"):
        kv_heads = source.integer(f"{arch}.attention.head_count_kv", heads, 1)
    width = source.integer(f"{arch}.embedding_length", 1, 1)
    key = source.integer(f"{arch}.attention.key_length", width // heads, 1)
    value = source.integer(f"{arch}.attention.value_length", key, 1)
    return source.integer(f"{arch}.block_count", 1, 1) * kv_heads * (key + value) * item_size


def _is_plain(source: GgufModel, arch: str | None, key: str) -> bool:
    """Return whether a metadata key has one number for all layers. Some architectures have a list with one number per
    layer."""
    return isinstance(source.metadata.get(f"{arch}.attention.{key}", 0), int)


def _num_tokens(config: ModelConfig, max_model_len: int, cell_bytes: int, block_size: int, weight_bytes: int) -> int:
    """Return the capacity of the KV cache in tokens. llama.cpp allocates the whole cache at once, so the default holds
    only a few contexts."""
    free = free_memory(torch.device("cpu")) - (config.reserved_memory or 0)
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_size
    elif config.kv_tokens is not None:
        wanted = config.kv_tokens
    elif config.kv_memory is not None:
        wanted = config.kv_memory // cell_bytes
    else:
        room = choose_room(
            max(free - weight_bytes, 0),
            "cpu",
            context_bytes=max_model_len * cell_bytes,
            weight_bytes=weight_bytes,
            max_seqs=CACHED_CONTEXTS,
            num_sharers=config.num_sharers,
            most=config.max_kv_memory,
        )
        num_tokens = max(room.num_bytes // cell_bytes, _LEAST_TOKENS)
        _log.info(
            "the KV cache holds %d tokens in %s: %s; set kv_memory (--kv-memory) to change that",
            *(num_tokens, show_bytes(num_tokens * cell_bytes), room.reason),
        )
        return num_tokens
    if wanted < 1 or wanted * cell_bytes > free:
        raise OutOfBlocks(
            f"a KV cache of {wanted} tokens needs {show_bytes(wanted * cell_bytes)}, but {show_bytes(free)} are free"
        )
    return wanted


def _known(source: GgufModel) -> tuple[GgufFamily | None, Config]:
    """Return the model family and its transformers configuration, which adapters need. The result is (None, {}) for an
    architecture that only llama.cpp supports."""
    try:
        family = find_family(source)
        return family, read_config(source, family)
    except UnsupportedModel:
        return None, {}
