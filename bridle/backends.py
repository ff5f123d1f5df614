"""Choice of the backend that computes a model: torch or llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.engine.interfaces import Sampler
    from bridle.llamacpp.executor import LlamaExecutor
    from bridle.load_progress import Report
    from bridle.model.executor import LocalExecutor
    from bridle.model.pooling.executor import PooledExecutor


def check_backend(config: ModelConfig) -> None:
    """Check the settings before a model is fetched: raise the backend's error for each setting that it does not
    support."""
    if config.backend == "llamacpp":
        from bridle.llamacpp import check_settings

        check_settings(config)


def load_executor(
    config: ModelConfig, progress: Report | None = None, sampler: Sampler | None = None
) -> LocalExecutor | PooledExecutor | LlamaExecutor:
    """Load a model with its backend, ready to compute. Raises the same errors as the backend's own loader."""
    if config.backend == "llamacpp":
        from bridle.llamacpp import load_executor as load_into_llamacpp

        return load_into_llamacpp(config, progress, sampler)
    from bridle.model import load_executor as load_into_torch

    return load_into_torch(config, progress, sampler)
