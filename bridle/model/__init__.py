"""The torch backend: runs decoder-only Hugging Face checkpoints in the model classes of transformers, over a paged KV
cache.

Names are imported when first used, so that `import bridle.model` (and `resolve_model`) needs no torch.
"""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.model.check import check_model as check_model
    from bridle.model.executor import LocalExecutor as LocalExecutor
    from bridle.model.hub_lookup import resolve_model as resolve_model
    from bridle.model.loading import load_executor as load_executor
    from bridle.model.parity import ParityReport as ParityReport
else:
    __getattr__, __all__ = lazy_names(
        __name__,
        {
            "check": "check_model",
            "executor": "LocalExecutor",
            "hub_lookup": "resolve_model",
            "loading": "load_executor",
            "parity": "ParityReport",
        },
    )
