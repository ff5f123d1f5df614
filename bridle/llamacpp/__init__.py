"""The llama.cpp backend, chosen with `--backend llamacpp`: an `Executor` over llama.cpp's low-level functions. The
backend reads GGUF files, and llama.cpp stores the KV of each sequence. The sampler of bridle chooses tokens from the
logits, so equal logits give the same tokens as with the torch backend. Needs the extra `llamacpp`.
"""

from bridle.llamacpp.loading import check_settings, load_executor

__all__ = ["check_settings", "load_executor"]
