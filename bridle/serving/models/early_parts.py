"""Starts the parts of a model that need neither torch nor transformers: a tokenizer, and the control runtime, which is
a separate process. The early parts become ready while torch is imported and the weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.config import ModelConfig
from bridle.early_start import await_unpacking
from bridle.serving.controller_runtime import ControlSettings, ControlStart
from bridle.serving.models.model_components import begin_control_of, load_tokenizer, tokenizer_folder
from bridle.threads import start_thread

if TYPE_CHECKING:
    from bridle.model.pooling.settings import Pooling
    from bridle.tokenizer import Tokenizer

_FileState = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class EarlyParts:
    """Parts that are being prepared for the model in the folder `path`. `tokenizer` is None if loading it must wait for
    the libraries. `files` are the files from which the parts are made, with their sizes and modification times."""

    config: ModelConfig
    path: Path
    pooling: Pooling | None
    control: ControlStart | None
    tokenizer: Future[Tokenizer] | None
    files: Sequence[_FileState]

    def get_tokenizer(self) -> Tokenizer:
        """Wait for the tokenizer and return it. Raises the error if the tokenizer could not be read."""
        return load_tokenizer(self.config, self.path) if self.tokenizer is None else self.tokenizer.result()

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the prepared parts fit `config` and their files have not changed. Memory settings are not
        compared."""
        from bridle.model.hub_lookup import folder_of

        memory = {name: getattr(config, name) for name in ("kv_memory", "max_kv_memory", "reserved_memory")}
        if replace(self.config, **memory) != config:
            return False
        path = folder_of(config)
        return path == self.path and _states(tokenizer_folder(config, path)) == self.files

    def abandon(self) -> None:
        """End the parts that were started."""
        if self.control is not None:
            self.control.abandon()


def begin_parts(config: ModelConfig, control: ControlSettings) -> EarlyParts:
    """Begin the parts of a model. Raises `InvalidRequest` or `UnsupportedModel` if the model does not exist or is not
    supported."""
    from bridle.gguf.pointer import weights_of
    from bridle.model.hub_lookup import folder_of
    from bridle.model.pooling.settings import read_pooling

    await_unpacking()
    path = folder_of(config)
    folder = tokenizer_folder(config, path)
    files = _states(folder)
    pooling = read_pooling(path)
    # a pooling model needs no control runtime
    starting = begin_control_of(config, path, control) if pooling is None else None
    tokenizer = None
    if weights_of(folder) is not None:
        tokenizer = start_thread(partial(load_tokenizer, config, path), "bridle-tokenizer")
    return EarlyParts(config, path, pooling, starting, tokenizer, files)


def _states(folder: Path) -> Sequence[_FileState]:
    found = [(path.name, path.stat()) for path in folder.iterdir() if path.is_file()]
    return sorted((name, state.st_size, state.st_mtime_ns) for name, state in found)
