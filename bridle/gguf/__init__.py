"""Reads GGUF files as untrusted input, writes them, and splits them into a configuration, a tokenizer and weights. This
package uses no model classes or executors; `bridle.model` puts the tensors into a model. A file is read, never
executed. All sizes and offsets in its header are checked against the file before any value is read.
"""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.gguf.reader import GgufFile as GgufFile
    from bridle.gguf.reader import TensorEntry as TensorEntry
    from bridle.gguf.reader import open_gguf as open_gguf
    from bridle.gguf.shards import GgufModel as GgufModel
    from bridle.gguf.shards import open_model as open_model
else:
    __getattr__, __all__ = lazy_names(
        __name__, {"reader": "GgufFile TensorEntry open_gguf", "shards": "GgufModel open_model"}
    )
