"""Converts a GGUF file to a model folder. Configuration, tokenizer and chat template are written as the usual files;
the weights stay in the GGUF file. If another GGUF file next to the model's file has a vision tower (`mmproj`), the
model includes the tower.

A folder is named after a digest of the file's header, so that each file is unpacked only once. The folders are in the
user's cache; deleted folders are created again when needed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridle.errors import UnsupportedModel
from bridle.file_cache import FileCache
from bridle.gguf.pointer import POINTER, cache_folder
from bridle.gguf.reader import GgufFile
from bridle.gguf.settings import check_causal, find_family, read_config
from bridle.gguf.shards import GgufModel, open_model, pieces_of
from bridle.gguf.vision import tower_beside, with_tower
from bridle.gguf.vocabulary import GgufVocabulary, read_vocabulary

_log = logging.getLogger(__name__)

#: The field of a configuration that has the reason why torch cannot compute the model.
REFUSED = "bridle_refused"
#: The version of the folders' contents. After a change of it, all folders are made again.
_EDITION = b"4"


def is_unpacked(path: Path) -> bool:
    """Return whether the file was already unpacked. For an unpacked file, `unpack` only returns the folder."""
    return _known_folder(_named(path), tower_beside(_named(path))) is not None


def _named(path: Path) -> Path:
    return path.parent.resolve() / path.name  # the hub's cache has links to files with meaningless names


def unpack(path: Path, tower: Path | None = None) -> Path:
    """Return the folder of the model in GGUF file `path`, with the vision tower in `tower`. Without `tower`, a tower
    file next to the model is used if there is only one and it fits the model. Raises `UnsupportedModel`."""
    path = _named(path)
    given = tower is not None
    tower = tower_beside(path) if tower is None else _named(tower)
    known = _known_folder(path, tower)
    if known is not None:
        return known
    state = _state(path, tower)
    folder = _unpack(path, tower, given)
    if state is not None:
        _names().write(_place_of(path, state), folder.name.encode(), [])
    return folder


def _known_folder(path: Path, tower: Path | None) -> Path | None:
    """Return the folder into which a GGUF file was unpacked before, if the file has not changed since then. The header
    of the file is not read again. Returns None if the file changed or is new."""
    state = _state(path, tower)
    name = None if state is None else _names().read_text(_place_of(path, state))
    folder = None if name is None else cache_folder() / Path(name.decode()).name
    return folder if folder is not None and (folder / POINTER).is_file() else None


def _names() -> FileCache:
    return FileCache("gguf-names")


def _place_of(path: Path, state: list[list[Any]]) -> Path:
    return _names().path(path.stem, json.dumps([_EDITION.decode(), state]).encode())


def _state(path: Path, tower: Path | None) -> list[list[Any]] | None:
    """Return each file of a model with its size and modification time; return None if a file does not exist."""
    try:
        states = [(piece, piece.stat()) for piece in (*pieces_of(path), *([] if tower is None else [tower]))]
    except OSError:
        return None
    return [[str(piece), state.st_size, state.st_mtime_ns] for piece, state in states]


def _unpack(path: Path, tower: Path | None, is_given: bool) -> Path:
    model = open_model(path)
    check_causal(model)
    config, more = _config(model), {}
    files = list(model.files)
    if tower is not None:
        try:
            opened = open_model(tower)
            config, more["preprocessor_config.json"] = with_tower(model, config, opened)
            more[POINTER] = {"path": str(path), "tower": str(tower)}
            files += opened.files
        except UnsupportedModel as error:
            if is_given:
                raise
            _log.warning("the model is loaded without images, because its mmproj file cannot be used: %s", error)
    folder = cache_folder() / _name_of(model, files)
    if not (folder / POINTER).is_file():
        write_folder(folder, _files(path, config, read_vocabulary(model), more), POINTER)
    return folder


def _config(model: GgufModel) -> dict[str, Any]:
    """Return the model's configuration. If only llama.cpp supports the architecture, the configuration has the reason
    why other backends refuse the model."""
    try:
        family = find_family(model)
    except UnsupportedModel as error:
        num_tokens = len(model.texts("tokenizer.ggml.tokens"))
        return {"model_type": "gguf", REFUSED: str(error), "vocab_size": num_tokens}
    return read_config(model, family)


def is_adapter_file(source: str) -> bool:
    """Return whether `source` names a GGUF file on this machine."""
    return source.lower().endswith(".gguf") and Path(source).expanduser().is_file()


def _name_of(model: GgufModel, files: Sequence[GgufFile]) -> str:
    """Return the name of a model's folder: a digest of the headers' bytes and the files' paths. Paths are included
    because a copy of the file in another place may be changed independently."""
    digest = hashlib.blake2b(_EDITION, digest_size=12)
    for file in files:
        digest.update(str(file.path).encode())
        digest.update(file.header)
    return f"{model.path.stem[:60]}-{digest.hexdigest()}"


def _files(path: Path, config: dict[str, Any], vocabulary: GgufVocabulary, more: Mapping[str, Any]) -> dict[str, bytes]:
    tokenizer: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.roles}
    tokenizer["clean_up_tokenization_spaces"] = False
    if vocabulary.chat_template is not None:
        tokenizer["chat_template"] = vocabulary.chat_template
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": vocabulary.spec,
        "tokenizer_config.json": tokenizer,
        POINTER: {"path": str(path)},
        **more,
    }
    if vocabulary.end_ids:
        files["generation_config.json"] = {"eos_token_id": list(vocabulary.end_ids)}
    return {name: msgspec.json.encode(content) for name, content in files.items()}


def write_folder(folder: Path, files: Mapping[str, bytes], mark: str) -> None:
    """Create `folder` with all of `files`, or not at all. Another process may be creating the same folder, so the file
    `mark` shows that a folder is complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as made:
            draft = Path(made) / "folder"
            draft.mkdir()
            for name, content in files.items():
                (draft / name).write_bytes(content)
            try:
                draft.rename(folder)
            except OSError:
                if not (folder / mark).is_file():  # no other process has made it meanwhile
                    raise
    except OSError as error:
        raise UnsupportedModel(
            f"{folder} cannot be written ({error.strerror}); set BRIDLE_CACHE to another folder"
        ) from None
