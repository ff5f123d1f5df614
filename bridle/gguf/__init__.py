"""GGUF files: reads them as untrusted input, writes them, and separates them into a configuration, a tokenizer and
weights.

This package does not know model classes or executors; `bridle.model` puts the tensors into a model. A file is read,
never executed. The claims of its header are checked against the file's contents before any value is read.
"""

from bridle.gguf.reader import GgufFile, TensorEntry, open_gguf
from bridle.gguf.shards import GgufModel, open_model

__all__ = ["GgufFile", "GgufModel", "TensorEntry", "open_gguf", "open_model"]
