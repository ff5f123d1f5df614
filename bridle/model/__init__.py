"""A backend over torch and transformers: any decoder-only Hugging Face checkpoint behind one paged KV cache.

Names are imported when first used, so that `import bridle.model` (and `resolve_model`) needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle.model.check import check_model as check_model
    from bridle.model.executor import LocalExecutor as LocalExecutor
    from bridle.model.hub_lookup import resolve_model as resolve_model
    from bridle.model.loading import load_executor as load_executor
    from bridle.model.parity import ParityReport as ParityReport

_HOMES = {
    "LocalExecutor": "bridle.model.executor",
    "ParityReport": "bridle.model.parity",
    "check_model": "bridle.model.check",
    "load_executor": "bridle.model.loading",
    "resolve_model": "bridle.model.hub_lookup",
}

__all__ = ["LocalExecutor", "ParityReport", "check_model", "load_executor", "resolve_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
