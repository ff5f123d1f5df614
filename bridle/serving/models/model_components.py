"""The parts of a model that this process, replicas and the front of a cluster need: the tokenizer, the constraint
compiler, and the controller pools."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.config import ModelConfig
from bridle.serving.controller_runtime import ControlSettings, ControlStart, begin_control, guess_num_logits

if TYPE_CHECKING:
    from bridle.engine.interfaces import ExecutorInfo
    from bridle.structured_output import ConstraintPool
    from bridle.tokenizer import Tokenizer


def load_tokenizer(config: ModelConfig, folder: Path) -> Tokenizer:
    """Load the tokenizer of the model in `folder`, or the tokenizer that the configuration names instead."""
    from bridle.tokenizer import Tokenizer
    from bridle.tokenizer.chat_settings import ChatSettings

    tokenizer = Tokenizer.load(config.tokenizer or str(folder), config.revision if config.tokenizer else None)
    tokenizer.chat_settings = ChatSettings(
        config.tool_format,
        config.reasoning_format,
        config.parse_special_text,
        config.bare_calls,
        config.tool_prompt,
        config.thinking_budget_message,
        config.max_repeated_calls,
    )
    return tokenizer


def tokenizer_folder(config: ModelConfig, folder: Path) -> Path:
    """Return the folder of the model's tokenizer."""
    from bridle.model import resolve_model

    return folder if config.tokenizer is None else resolve_model(config.tokenizer, config.revision)


def begin_control_of(config: ModelConfig, folder: Path, control: ControlSettings) -> ControlStart | None:
    """Start the control runtime for the vocabulary of this model in the background. If the settings turn the control
    runtime off, the result is None."""
    if control.mode == "off":
        return None
    if control.runtime is None:
        control = replace(control, args=(*_chat_flags(config), *control.args))
    return begin_control(control, tokenizer_folder(config, folder), guess_num_logits(folder))


def _chat_flags(config: ModelConfig) -> tuple[str, ...]:
    """Return the flags of bridle's own runtime that say how scripts write conversations."""
    refuses = ("--tool-prompt=refuse",) if config.tool_prompt == "refuse" else ()
    return (*refuses, "--parse-special-text") if config.parse_special_text else refuses


def constraint_pool(tokenizer: Tokenizer, info: ExecutorInfo) -> ConstraintPool:
    """Return the pool that compiles and runs constraints for this model's tokens."""
    from bridle.structured_output import ConstraintPool, vocabulary_of

    make = partial(vocabulary_of, tokenizer, info.vocab_size, info.eos_token_ids)
    return ConstraintPool(make)
