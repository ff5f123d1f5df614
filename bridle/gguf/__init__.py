"""Reads GGUF files as untrusted input, writes them, and splits them into a configuration, a tokenizer and weights. This
package uses no model classes or executors; `bridle.model` puts the tensors into a model. A file is read, never
executed. All sizes and offsets in its header are checked against the file before any value is read.
"""

from bridle.gguf.reader import GgufFile, TensorEntry, open_gguf
from bridle.gguf.shards import GgufModel, open_model

__all__ = ["GgufFile", "GgufModel", "TensorEntry", "open_gguf", "open_model"]
