"""GGUF files: reads them with distrust, writes them, and separates them into a configuration, a tokenizer and weights.

This package knows no model class or executor; `bridle.model` puts the tensors into one. A file is mapped, never
executed; what its header claims is checked against what the file holds before a single number is read.
"""

from bridle.gguf.reader import GgufFile, TensorEntry, open_gguf
from bridle.gguf.shards import GgufModel, open_model

__all__ = ["GgufFile", "GgufModel", "TensorEntry", "open_gguf", "open_model"]
