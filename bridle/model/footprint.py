"""How much memory a model will take, by its files, and how much there is. Bytes throughout. Loads nothing."""

from __future__ import annotations

from bridle.config import ModelConfig
from bridle.model import guards
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.loader import choose_device, choose_dtype
from bridle.model.memory import free_memory
from bridle.model.resolve import resolve_model


def weights_of(config: ModelConfig) -> int:
    """What the weights of a model will take, by the headers of its files; fetches them if need be. Raises what loading
    would raise for a checkpoint that cannot be loaded."""
    checkpoint = inspect_checkpoint(resolve_model(config.model, config.revision))
    dtype = choose_dtype(config, guards.read_config(checkpoint), choose_device(config.device))
    return checkpoint.num_values * dtype.itemsize


def free_on(config: ModelConfig) -> int:
    """What is free on the device that a model would be loaded to."""
    return free_memory(choose_device(config.device))
