"""Reads a tokenizer and its configuration from a model's folder. It runs no code from the folder, and uses
no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bridle.errors import UnsupportedModel
from bridle.model.added_tokens import refuse_renumbered


def load_fast_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer as a transformers fast tokenizer. Raises `UnsupportedModel` with the reason."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises almost anything here
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UnsupportedModel(f"{folder} has no tokenizer that can be loaded: {reason}") from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise UnsupportedModel(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has no fast version; "
            "save it once with a tokenizer.json"
        )
    if not _spells(loaded.backend_tokenizer):
        raise UnsupportedModel(
            f"{folder} has no tokenizer: nothing there says which tokens there are; put the model's tokenizer.json "
            "into it, or name another model's tokenizer"
        )
    refuse_renumbered(folder, loaded.backend_tokenizer)
    return loaded


def _spells(backend: Any) -> bool:
    """Whether the tokenizer has any token but added ones. For a folder without files the library makes one up that has
    none."""
    added = {info.content for info in backend.get_added_tokens_decoder().values()}
    return not added.issuperset(backend.get_vocab(with_added_tokens=False))


def chat_template_of(folder: Path, loaded: Any) -> Any:
    """The chat template of a model, or several by name. Models that take images have theirs in a file of its own, which
    goes before the tokenizer's."""
    found = _read(folder / "chat_template.json").get("chat_template")
    return found if isinstance(found, str) else loaded.chat_template


def end_tokens(folder: Path) -> list[int]:
    """End-of-sequence ids that the model's `generation_config.json` names, or else its `config.json`."""
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
