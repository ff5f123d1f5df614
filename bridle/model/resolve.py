"""From the name of a model to a folder on this machine. Knows files and the hub, nothing of weights; no torch.

Only safetensors, JSON and tokenizer files are ever fetched: no pickles, no Python code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bridle.errors import BridleError, InvalidRequest, UnsupportedModel

#: What is fetched from the hub. `*.txt` and `*.model` are vocabularies of older tokenizers.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.txt", "tokenizer*", "*.model", "*.jinja")
HUB_IGNORED = ("original/*", "*.bin", "*.pt", "*.pth", "*.py", "*.gguf", "onnx/*", "coreml/*")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?")


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The folder of `model`: the demo model (`demo`), a folder, or a hub id, fetched or found in the hub's cache.

    Honors `HF_HUB_OFFLINE`. Raises `InvalidRequest` if the name is neither, `UnsupportedModel` if the hub does
    not have it or cannot be reached.
    """
    if model == "demo":
        return _demo_folder()
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        raise UnsupportedModel(f"{model!r} is a file; name the folder that holds config.json and *.safetensors")
    if not _HUB_ID.fullmatch(model) or ".." in model:
        raise InvalidRequest(
            f"{model!r} is neither 'demo', nor an existing folder, nor a hub id such as 'owner/name'", "model"
        )
    return _fetch(model, revision)


def _demo_folder() -> Path:
    try:
        from bridle.demo import demo_model_path
    except ImportError as error:
        raise UnsupportedModel("this build of bridle does not contain the demo model") from error
    return Path(demo_model_path())


def _fetch(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(HUB_PATTERNS),
            ignore_patterns=list(HUB_IGNORED),
            token=os.environ.get("HF_TOKEN") or None,
        )
    except Exception as error:
        raise _translate(error, model, revision) from error
    return Path(folder)


def _translate(error: Exception, model: str, revision: str | None) -> BridleError:
    """The hub client's many errors, as one sentence that says what to do."""
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return UnsupportedModel(f"model {model!r} is gated: accept its terms on the hub and set HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return UnsupportedModel(f"model {model!r} has no revision {revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UnsupportedModel(f"there is no folder {model!r}, and the hub has no such model (or it is private)")
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_offline():
        return UnsupportedModel(
            f"model {model!r}{at} is not in the local hub cache, and the hub cannot be reached "
            f"(offline mode is {'on' if _is_offline() else 'off'})"
        )
    return UnsupportedModel(f"model {model!r}{at} could not be fetched: {type(error).__name__}: {error}")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}
