"""Looks up model names on the hub and in its local cache, without torch. Lists cached models, explains errors of the
hub, and suggests the known model name closest to a wrong name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bridle.compat.suggestions import closest
from bridle.demo import DEMO_MODELS
from bridle.errors import BridleError, UnsupportedModel

#: Model names that users often try first. They are only suggestions: any other name is looked up in the same way.
POPULAR = (
    "google/gemma-3-1b-it",
    "google/gemma-3-4b-it",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "HuggingFaceTB/SmolLM3-3B",
    "HuggingFaceTB/SmolVLM-256M-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "microsoft/Phi-4-mini-instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "openai-community/gpt2",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-Embedding-0.6B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
)
_SECONDS = 20.0  # timeout for an answer of the hub


def ask_hub(model: str, revision: str | None = None) -> None:
    """Check that the hub has the repository `model` and lets this user read it. Raises `UnsupportedModel` with the
    hub's reason."""
    if is_offline():
        raise _offline(model, revision, suggestion(model))
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ.get("HF_TOKEN") or None)
    try:
        if api.model_info(model, revision=revision, timeout=_SECONDS).gated:
            api.auth_check(model)
    except Exception as error:
        raise refusal(error, model, revision, suggestion(model)) from error


def refusal(error: Exception, model: str, revision: str | None, hint: str = "") -> BridleError:
    """Convert an exception of the hub client to an error whose message has the next step. If the name may be wrong, the
    message ends with `hint`. Clients of a server get no hint, because a hint may name the operator's other models."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return UnsupportedModel(
            f"model {model!r} is gated: accept its terms at {_endpoint()}/{model}, and set HF_TOKEN to a token of yours"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UnsupportedModel(f"model {model!r} has no revision {revision!r} on {_endpoint()}; leave --revision out")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UnsupportedModel(
            f"model {model!r} was not found: there is no such folder, and {_endpoint()} has no such model (a private "
            f"one needs HF_TOKEN){hint}"
        )
    if is_offline():
        return _offline(model, revision, hint)
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return UnsupportedModel(f"model {model!r}{_at(revision)}: {_endpoint()} answered with status {status}")
    if isinstance(error, errors.LocalEntryNotFoundError | OSError) or _is_network(error):
        cause = str(error.__cause__ or error).split("\n")[0] or type(error).__name__
        return UnsupportedModel(
            f"model {model!r}{_at(revision)} is not in the local hub cache, and {_endpoint()} cannot be reached: "
            f"{cause}{hint}"
        )
    return UnsupportedModel(f"model {model!r}{_at(revision)} could not be fetched: {type(error).__name__}: {error}")


def _offline(model: str, revision: str | None, hint: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model {model!r}{_at(revision)} is not in the local hub cache, and offline mode is on: unset HF_HUB_OFFLINE"
        f"{hint}"
    )


def suggestion(model: str) -> str:
    """Return a question that suggests the known model whose name is closest to a wrong name. If no known name is close,
    return the commands that list models."""
    found = closest(model, (*DEMO_MODELS, *cached_models(), *POPULAR))
    if found is not None:
        return f". Did you mean {found}?"
    return ". `bridle list` shows the models on this machine, `bridle pull` the short names"


def cached_models() -> Iterator[str]:
    """Yield the hub ids of the models in the local cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    if folder.is_dir():
        yield from sorted(
            each.name.removeprefix("models--").replace("--", "/")
            for each in folder.iterdir()
            if each.name.startswith("models--")
        )


def is_cached(model: str, revision: str | None = None) -> bool:
    """Return whether some files of the repository's `revision` are in the local cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    if revision is not None:
        return (folder / "refs" / revision).is_file() or (folder / "snapshots" / revision).is_dir()
    snapshots = folder / "snapshots"
    return snapshots.is_dir() and any(snapshots.iterdir())


def is_offline() -> bool:
    """Return whether bridle must not contact the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _is_network(error: Exception) -> bool:
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)  # for every HTTP client library


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _at(revision: str | None) -> str:
    return f" at revision {revision!r}" if revision else ""
