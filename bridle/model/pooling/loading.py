"""Loads a pooling model from its folder into an executor. If a stage refuses the model, it raises an error that says
why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES

from bridle.config import ModelConfig
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.warm_up import run_largest_step
from bridle.errors import InvalidRequest, UnsupportedModel
from bridle.load_progress import Report, part_of
from bridle.model import memory, support_checks, tensor_parallel
from bridle.model.checkpoint import Checkpoint, inspect_checkpoint
from bridle.model.device_defaults import choose_device, choose_dtype, choose_threads
from bridle.model.pooling.executor import PooledExecutor
from bridle.model.pooling.heads import classifier_head, embedding_head
from bridle.model.pooling.model import PooledModel
from bridle.model.pooling.relative import lower_relative
from bridle.model.pooling.self_test import check_packing
from bridle.model.pooling.settings import Pooling
from bridle.model.rope import fix_rotary_scaling
from bridle.model.weight_reading import read_weights

#: Tokens per step: enough to fill the matrix units, few enough that a new text does not wait long.
STEP_TOKENS = {"cpu": 1024, "cuda": 16_384}
STEP_SEQS = 256
#: There are no KV blocks, but the scheduler counts texts in blocks of this size.
_BLOCK_SIZE = 16


def load_pooled(config: ModelConfig, folder: Path, pooling: Pooling, report: Report) -> PooledExecutor:
    """Return the executor of a model that computes vectors or labels for texts. Raises `UnsupportedModel` or
    `InvalidRequest`."""
    device = choose_device(config.device)
    choose_threads(config.num_threads)
    checkpoint = inspect_checkpoint(folder)
    settings = support_checks.read_config(checkpoint, pools=True)
    dtype = choose_dtype(config, settings, device)
    check_supported(pooling, settings, config)
    memory.check_weights_fit(checkpoint.weight_bytes(dtype.itemsize, keeps_blocks=False), dtype.itemsize, device)
    report("reading weights", 0.05)
    model = read_encoder(
        checkpoint, settings, pooling, dtype, device, lambda share: report("reading weights", part_of(0.05, 0.9, share))
    )
    fix_rotary_scaling(model.base, support_checks.max_positions(settings))
    report("running the largest step", 0.9)
    executor = build_pooled(config, checkpoint, settings, pooling, model, dtype, device)
    report("ready", 1.0)
    return executor


def check_supported(pooling: Pooling, settings: PreTrainedConfig, config: ModelConfig) -> None:
    """Raise an error if the configuration or a setting is not supported. The check runs before any weight is read."""
    name = settings.model_type
    known = MODEL_MAPPING_NAMES if pooling.task == "embed" else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if name not in known:
        raise UnsupportedModel(f"model type {name!r} is not known to transformers for the task {pooling.task!r}")
    if getattr(settings, "quantization_config", None) is not None:
        raise UnsupportedModel("quantized checkpoints of pooling models are not supported; use the original weights")
    if config.quantization not in ("none", "auto"):
        raise InvalidRequest(
            f"quantization is {config.quantization!r}; pooling models are not quantized; use 'none'", "quantization"
        )
    if config.draft_model is not None:
        raise InvalidRequest("a pooling model samples no tokens, so leave draft_model out", "draft_model")
    if tensor_parallel.num_ranks() > 1:
        raise InvalidRequest("a pooling model runs in one process; set shards to 1, or use replicas", "model")


def read_encoder(
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    pooling: Pooling,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> PooledModel:
    """Read the weights into the model class of transformers, with bridle's attention. Every weight must be in the
    checkpoint."""
    if pooling.task == "classify":
        classifier: Any = read_weights(
            AutoModelForSequenceClassification, checkpoint, settings, dtype, device, progress=progress
        )
        size = int(settings.num_labels)
        if size != len(pooling.labels):
            raise UnsupportedModel(f"config.json names {len(pooling.labels)} labels, but the head has {size} outputs")
        head = classifier_head(classifier)
        lower_relative(classifier.base_model)
        return PooledModel(classifier.base_model, head, size, pooling.num_types, device)
    options = _without_pooler(settings)
    base: Any = read_weights(AutoModel, checkpoint, settings, dtype, device, progress=progress, **options)
    lower_relative(base)
    hidden = int(settings.get_text_config().hidden_size)
    vectors, size = embedding_head(pooling.modules, checkpoint.folder, hidden, device)
    return PooledModel(base, vectors, size, pooling.num_types, device)


def _without_pooler(settings: PreTrainedConfig) -> dict[str, Any]:
    """Return the option that leaves out BERT's pooler, if the model class has this option. The pooler layer was trained
    for other purposes, and many checkpoints lack it."""
    kind = AutoModel._model_mapping[type(settings)]
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}


def build_pooled(
    config: ModelConfig,
    checkpoint: Checkpoint,
    settings: PreTrainedConfig,
    pooling: Pooling,
    model: PooledModel,
    dtype: torch.dtype,
    device: torch.device,
) -> PooledExecutor:
    """Check that packed passes are correct for the model and that the largest step fits into memory. Return the
    executor."""
    max_len = _max_len(config, settings, pooling, model)
    check_packing(model, settings.model_type, max_len)
    step_tokens = max(config.step_tokens or STEP_TOKENS[device.type], max_len)
    step_seqs = config.step_seqs or STEP_SEQS
    info = ExecutorInfo(
        model=config.model,
        vocab_size=model.num_ids * model.num_types,
        max_model_len=max_len,
        num_blocks=step_tokens // _BLOCK_SIZE + step_seqs + 1,  # any step fits
        block_size=_BLOCK_SIZE,
        kv="sequences",
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        max_num_batched_tokens=step_tokens,
        max_num_seqs=step_seqs,
        embedding_size=model.size,
        task=pooling.task,
    )
    executor = PooledExecutor(info, model, device)
    if config.warm_up:
        try:
            run_largest_step(executor)
        except RuntimeError as error:
            raise UnsupportedModel(f"the largest step ({step_tokens} tokens) fails: {error}") from error
    return executor


def _max_len(config: ModelConfig, settings: PreTrainedConfig, pooling: Pooling, model: PooledModel) -> int:
    """Return the maximum length of a text in tokens: the number of positions, or a lower limit set by the folder or by
    `config`."""
    positions = support_checks.max_positions(settings) - model.position_offset
    limit = min(positions, pooling.max_length or positions)
    wanted = config.max_model_len
    if wanted is None or wanted <= limit:
        return wanted or limit
    if wanted <= positions:
        return wanted  # the caller's limit overrides the folder's
    raise InvalidRequest(f"max_model_len is {wanted}; the model supports at most {positions}", "max_model_len")
