"""Reads a tokenizer and its configuration from a model's folder. No code from the folder is run, and no network is
used."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from bridle.errors import UnsupportedModel
from bridle.file_cache import FileCache
from bridle.gguf.pointer import weights_of
from bridle.malloc import return_free_memory
from bridle.model.added_tokens import refuse_renumbered

#: The minimum size of files that are cached; smaller files are read again as quickly.
_LEAST_BYTES = 1 << 20
#: The roles of special tokens, as configurations name them.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a folder. `backend` is a `tokenizers.Tokenizer`, or a function that reads one. `roles` has the
    special tokens by role. `chat_template` is one template, or several by name. `is_derived`: transformers made the
    tokenizer from files in another format. `special` are tokens that the reader adds as special tokens."""

    backend: Any
    roles: dict[str, str]
    chat_template: Any
    is_derived: bool = False
    special: tuple[str, ...] = ()


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Return the tokenizer of a folder. Raises `UnsupportedModel` with the reason."""
    if weights_of(folder) is not None:  # bridle wrote the folder: reading it needs no transformers
        return _read_unpacked(folder)
    loaded = load_fast_tokenizer(folder)
    roles = {role: str(token) for role, token in loaded.special_tokens_map.items() if token}
    return TokenizerFiles(loaded.backend_tokenizer, roles, chat_template_of(folder, loaded), is_derived=True)


def outline_unpacked(folder: Path) -> TokenizerFiles | None:
    """Return the facts about a folder's tokenizer that are known without reading it. `backend` is a function that reads
    it. Returns None for a folder that bridle did not write."""
    if weights_of(folder) is None:
        return None
    config = _read(folder / "tokenizer_config.json")
    roles = {role: config[role] for role in _ROLES if isinstance(config.get(role), str)}
    special = tuple(roles.values())
    return TokenizerFiles(lambda: _read_unpacked(folder).backend, roles, config.get("chat_template"), special=special)


def _read_unpacked(folder: Path) -> TokenizerFiles:
    outline = outline_unpacked(folder)
    assert outline is not None
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare exceptions
        raise UnsupportedModel(f"{folder} has no tokenizer that can be loaded: {error}; remove the folder") from None
    known = {info.content for info in backend.get_added_tokens_decoder().values()}
    new = [tokenizers.AddedToken(t, normalized=False, special=True) for t in outline.special if t not in known]
    backend.add_special_tokens(new)
    check_added(folder, backend)
    return_free_memory()  # reading needs ten times the file's size, and weights are loaded next
    return replace(outline, backend=backend)


def check_added(folder: Path, backend: Any) -> None:
    """Raise `UnsupportedModel` if added tokens have other ids than the folder's files say. A large file is checked
    again only if it has changed."""
    paths = [path for path in (folder / "tokenizer.json", folder / "tokenizer_config.json") if path.is_file()]
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    files = FileCache("tokenizers")
    place = files.path(folder.name, json.dumps([tokenizers.__version__, states]).encode())
    if files.read_text(place) is None:
        refuse_renumbered(folder, backend)
        if sum(size for _, size, _ in states) >= _LEAST_BYTES:
            files.write(place, b"added tokens have the ids that they should have", [])


def load_fast_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer as a fast tokenizer of transformers. Raises `UnsupportedModel` with the reason."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library may raise any error here
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UnsupportedModel(f"{folder} has no tokenizer that can be loaded: {reason}") from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise UnsupportedModel(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has no fast version; save it with a tokenizer.json"
        )
    if not _spells(loaded.backend_tokenizer):
        raise UnsupportedModel(
            f"{folder} has no tokenizer: none of its files lists tokens; put the model's tokenizer.json "
            "into it, or name another model's tokenizer"
        )
    check_added(folder, loaded.backend_tokenizer)
    return loaded


def decoder_of(backend: Any) -> dict[str, Any] | None:
    """Return the decoder of a `tokenizers.Tokenizer` in the format of its file; None if it has none."""
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _spells(backend: Any) -> bool:
    """Return whether the tokenizer has other tokens than added tokens. For a folder without files, the library makes up
    a tokenizer that has only added tokens."""
    added = {info.content for info in backend.get_added_tokens_decoder().values()}
    return not added.issuperset(backend.get_vocab(with_added_tokens=False))


def chat_template_of(folder: Path, loaded: Any) -> Any:
    """Return the chat template of a model, or several by name. Models that read images have it in a separate file,
    which has precedence over the tokenizer's template."""
    found = _read(folder / "chat_template.json").get("chat_template")
    return found if isinstance(found, str) else loaded.chat_template


def stored_chat_template(folder: Path) -> str | dict[str, str] | None:
    """Return the chat template in the folder's files, without using transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read(folder / "chat_template.json").get("chat_template")
    if not isinstance(found, str):
        found = _read(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found if {"name", "template"} <= each.keys()}
    return found if isinstance(found, (str, dict)) else None


def end_tokens(folder: Path) -> list[int]:
    """Return the end-of-sequence ids from the model's `generation_config.json`, or else from its `config.json`."""
    for name in ("generation_config.json", "config.json"):
        found = _ids(_read(folder / name).get("eos_token_id"))
        if found:
            return found
    return []


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
