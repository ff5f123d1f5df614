"""A model's formats of tool calls and reasoning. They are inferred when the model is loaded, and reported by `bridle
doctor`, the model routes, the log and traces."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bridle.chat.reasoning import tags_of
from bridle.chat.tool_parsers.formats import UNKNOWN, described
from bridle.chat.tool_parsers.harmony import harmony_of
from bridle.controllers.thinking import sentence_tokens
from bridle.errors import BridleError

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.load_progress import Report
    from bridle.serving import LoadedModel
    from bridle.serving.models.model_loader import ModelLoader
    from bridle.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_KNOWN: WeakKeyDictionary[Tokenizer, dict[str, Any]] = WeakKeyDictionary()


def chat_format(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the format of tool calls and the tags around reasoning; None for a model without a chat template. Raises
    `InvalidRequest` if the operator configured formats that the model cannot have."""
    if not tokenizer.chat_template.is_present:
        return None
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = {"tool_format": described(tokenizer), "reasoning_format": _reasoning(tokenizer)}
    return _KNOWN[tokenizer]


def _reasoning(tokenizer: Tokenizer) -> dict[str, str] | None:
    tags = tags_of(tokenizer)
    if tags is not None:
        return {"opening": tags.opening, "closing": tags.closing}
    return (
        None if harmony_of(tokenizer) is None else {"opening": "<|channel|>analysis<|message|>", "closing": "<|end|>"}
    )


def summary(tokenizer: Tokenizer) -> str:
    """Return the formats of a model in one line; empty for a model without a chat template."""
    found = chat_format(tokenizer)
    if found is None:
        return ""
    calls, reasoning = found["tool_format"], found["reasoning_format"]
    if calls["name"] == UNKNOWN:
        return f"tool calls in an unknown format, so requests with tools are refused; {_thoughts(reasoning)}"
    sample = "".join((calls.get("section_open", ""), *calls.get("call", ()), calls.get("section_close", "")))
    written = f" ({' '.join(sample.split())})" if sample else ""
    return f"tool calls in the format {calls['name']}{written}, {_thoughts(reasoning)}"


def _thoughts(tags: dict[str, str] | None) -> str:
    return "no reasoning" if tags is None else f"reasoning between {tags['opening']} and {tags['closing']}"


# -- at the time of loading ------------------------------------------------------------------------------------


def learn(model: LoadedModel) -> None:
    """Find a model's formats of calls and reasoning, and log them, or the reason why they cannot be used. Renders the
    chat template many times."""
    tokenizer = model.tokenizer
    try:
        model.chat_format = chat_format(tokenizer)
        tags = tags_of(tokenizer)
        if tags is not None:
            said = tokenizer.chat_settings.thinking_budget_message
            sentence_tokens(tokenizer, said, (tags.opening_token, tags.closing_token))
    except BridleError as error:
        _log.warning("the chat format of %s cannot be used, requests that need it are refused: %s", model.name, error)
        return
    if model.chat_format is not None:
        _log.debug("chat format of %s: %s", model.name, summary(tokenizer))


class LearningLoader:
    """A loader that infers the chat format of each model before the model accepts requests."""

    def __init__(self, loader: ModelLoader) -> None:
        self._loader = loader
        self.measure, self.make_room = loader.measure, loader.make_room

    def load(self, config: ModelConfig, name: str, progress: Report) -> LoadedModel:
        """Load a model and infer its chat format."""
        model = self._loader.load(config, name, progress)
        if model.pooling is None:
            learn(model)
        return model
