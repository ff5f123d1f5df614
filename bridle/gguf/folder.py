"""A GGUF file as a model folder: configuration, tokenizer and chat template are written out as the usual files, and the
weights stay in the GGUF file.

A folder is named after a digest of the file's header, so that the same file is unpacked once. The folders lie in the
user's cache, and everything in them can be made anew.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bridle import file_cache
from bridle.errors import UnsupportedModel
from bridle.file_cache import FileCache
from bridle.gguf.settings import check_causal, find_family, read_config
from bridle.gguf.shards import GgufModel, open_model, pieces_of
from bridle.gguf.vocabulary import GgufVocabulary, read_vocabulary

#: The file that names the GGUF file whose weights a folder stands for.
POINTER = "gguf.json"
#: The field of a configuration that says why torch cannot compute the model.
REFUSED = "bridle_refused"
#: The version of the folders' contents: a change makes all of them anew.
_EDITION = b"3"
_MAX_LINKS = 4096


def is_unpacked(path: Path) -> bool:
    """Return whether `unpack` has nothing to do for a file."""
    return _known_folder(_named(path)) is not None


def _named(path: Path) -> Path:
    return path.parent.resolve() / path.name  # the hub's cache links to files whose names say nothing


def unpack(path: Path) -> Path:
    """The folder of the model in GGUF file `path`. Raises `UnsupportedModel`."""
    path = _named(path)
    known = _known_folder(path)
    if known is not None:
        return known
    state = _state(path)
    folder = _unpack(path)
    if state is not None:
        _names().write(_place_of(path, state), folder.name.encode(), [])
    return folder


def _known_folder(path: Path) -> Path | None:
    """The folder of a file that was not changed since it was unpacked: its header is not read again."""
    state = _state(path)
    name = None if state is None else _names().read_text(_place_of(path, state))
    folder = None if name is None else cache_folder() / Path(name.decode()).name
    return folder if folder is not None and (folder / POINTER).is_file() else None


def _names() -> FileCache:
    return FileCache("gguf-names")


def _place_of(path: Path, state: list[list[Any]]) -> Path:
    return _names().path(path.stem, json.dumps([_EDITION.decode(), state]).encode())


def _state(path: Path) -> list[list[Any]] | None:
    """The files of a model, with sizes and times of change; None if they are not there."""
    try:
        states = [(piece, piece.stat()) for piece in pieces_of(path)]
    except OSError:
        return None
    return [[str(piece), state.st_size, state.st_mtime_ns] for piece, state in states]


def _unpack(path: Path) -> Path:
    model = open_model(path)
    check_causal(model)
    folder = cache_folder() / _name_of(model)
    if (folder / POINTER).is_file():
        return folder
    config = _config(model)
    vocabulary = read_vocabulary(model)
    write_folder(folder, _files(path, config, vocabulary), POINTER)
    return folder


def _config(model: GgufModel) -> dict[str, Any]:
    """The configuration. For an architecture that only llama.cpp computes, it says why other backends refuse it."""
    try:
        family = find_family(model)
    except UnsupportedModel as error:
        num_tokens = len(model.texts("tokenizer.ggml.tokens"))
        return {"model_type": "gguf", REFUSED: str(error), "vocab_size": num_tokens}
    return read_config(model, family)


def cache_folder() -> Path:
    """The cache folder for GGUF files."""
    return file_cache.cache_folder() / "gguf"


def weights_of(folder: Path) -> Path | None:
    """The GGUF file that a folder of the cache stands for; None for any other folder, whatever files it brings."""
    pointer = folder / POINTER
    if not folder.resolve().is_relative_to(cache_folder().resolve()) or not pointer.is_file():
        return None
    try:
        if pointer.stat().st_size > _MAX_LINKS:
            raise ValueError("it is too long")
        return Path(json.loads(pointer.read_text(encoding="utf-8"))["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{pointer} is damaged: {error}; remove {folder}") from None


def is_adapter_file(source: str) -> bool:
    """Return whether `source` names a GGUF file on this machine."""
    return source.lower().endswith(".gguf") and Path(source).expanduser().is_file()


def _name_of(model: GgufModel) -> str:
    """The folder's name, from the header's bytes and the file's path: a copy elsewhere may be changed independently."""
    digest = hashlib.blake2b(_EDITION, digest_size=12)
    for file in model.files:
        digest.update(str(file.path).encode())
        digest.update(file.header)
    return f"{model.path.stem[:60]}-{digest.hexdigest()}"


def _files(path: Path, config: dict[str, Any], vocabulary: GgufVocabulary) -> dict[str, bytes]:
    tokenizer: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.roles}
    tokenizer["clean_up_tokenization_spaces"] = False
    if vocabulary.chat_template is not None:
        tokenizer["chat_template"] = vocabulary.chat_template
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": vocabulary.spec,
        "tokenizer_config.json": tokenizer,
        POINTER: {"path": str(path)},
    }
    if vocabulary.end_ids:
        files["generation_config.json"] = {"eos_token_id": list(vocabulary.end_ids)}
    return {name: msgspec.json.encode(content) for name, content in files.items()}


def write_folder(folder: Path, files: Mapping[str, bytes], mark: str) -> None:
    """Make `folder` with all of `files` or none, of which `mark` tells that it is one: another process may be doing the
    same."""
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
                if not (folder / mark).is_file():  # not made by somebody else meanwhile
                    raise
    except OSError as error:
        raise UnsupportedModel(
            f"{folder} cannot be written ({error.strerror}); BRIDLE_CACHE names another place"
        ) from None
