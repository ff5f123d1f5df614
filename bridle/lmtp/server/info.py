"""The server's description of its models and extensions: the answer to MODEL_INFO."""

from __future__ import annotations

from typing import Any

import bridle
from bridle.errors import BridleError
from bridle.lmtp.failures import error_text
from bridle.lmtp.messages import FEATURES, UNAVAILABLE, ModelInfo, Msg
from bridle.serving import LoadedModel, ModelRegistry, ModelState

#: The name with which clients ask for the server's default model.
AUTO = "auto"


def served_name(registry: ModelRegistry, name: str) -> str | None:
    """Return the name under which the registry has a model; None for the default model."""
    return None if name == AUTO and AUTO not in registry.names else name


def describe(registry: ModelRegistry, asked: ModelInfo) -> Msg:
    """Answer a MODEL_INFO request without waiting. For a model that is not loaded, the answer says only that it is
    unavailable."""
    try:
        name, adapter = registry.choose(served_name(registry, asked.model))
        if registry.state_of(name) is ModelState.LOADED:
            found = facts(registry.resolve(name))
            return Msg(stream_id=asked.stream_id, model_info=found if adapter is None else found | {"adapter": adapter})
    except BridleError as error:
        return Msg(
            stream_id=asked.stream_id, model_info=UNAVAILABLE, error=error_text(error), code=error.code, lmtp=FEATURES
        )
    return Msg(stream_id=asked.stream_id, model_info=UNAVAILABLE, lmtp=FEATURES)


def facts(model: LoadedModel) -> dict[str, Any]:
    """Return the description of a model: the model's identity, the token data that a client needs, and the
    extensions."""
    info = model.info
    return {
        "model": model.name,
        "model_type": "bridle",
        "constructor": f"bridle.LLM('{model.name}')",
        "bridle": bridle.__version__,
        "vocab_size": info.vocab_size,
        "bos_token_id": model.tokenizer.bos_token_id,
        "eos_token_ids": list(info.eos_token_ids),
        "max_model_len": model.max_sequence_tokens,
        "dtype": info.dtype,
        "device": info.device,
        "adapters": [adapter.name for adapter in model.adapters.list()],
        "lmtp": dict(FEATURES),
    }
