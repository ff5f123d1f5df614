"""GGUF files: read with distrust, written, and told apart into a configuration, a tokenizer and weights.

Nothing here knows a model class or an executor: `bridle.model` puts the tensors into one. A file is mapped, never
executed; what its header claims is checked against what the file holds before a single number is read.
"""

from bridle.gguf.reader import GgufFile, TensorEntry, open_gguf
from bridle.gguf.shards import GgufModel, open_model

__all__ = ["GgufFile", "GgufModel", "TensorEntry", "open_gguf", "open_model"]
