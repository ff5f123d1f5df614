"""llama.cpp as a backend: the same `Executor` over its low-level functions, chosen with `--backend llamacpp`.

It reads GGUF files and keeps KV by sequence. Tokens are drawn by bridle's own sampler over the rows of logits, so a
draw is what it is on torch wherever the logits are. Needs the extra `llamacpp`.
"""

from bridle.llamacpp.loading import check_settings, load_executor

__all__ = ["check_settings", "load_executor"]
