"""llama.cpp as a backend: the same `Executor` over its low-level functions, chosen with `--backend llamacpp`.

The backend reads GGUF files and keeps KV by sequence. Tokens are sampled by bridle's own sampler over the rows of
logits, so equal logits give the same tokens as on torch. Needs the extra `llamacpp`.
"""

from bridle.llamacpp.loading import check_settings, load_executor

__all__ = ["check_settings", "load_executor"]
