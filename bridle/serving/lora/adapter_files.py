"""Sources of adapters that are files of llama.cpp: converted to folders."""

from __future__ import annotations

from pathlib import Path

from bridle.config import ModelConfig
from bridle.gguf.folder import is_adapter_file


def unpack_source(config: ModelConfig, source: str) -> str:
    """Return `source`, or the converted folder if it is a GGUF file, for the model of `config`. Raises
    `AdapterRefused`."""
    if not is_adapter_file(source):
        return source
    from bridle.gguf.adapter import unpack_adapter
    from bridle.model.checkpoint import read_json
    from bridle.model.hub_lookup import folder_of

    folder = folder_of(config)
    return str(unpack_adapter(Path(source), read_json(folder / "config.json", required=True)))
