"""Converts the prompts, options and settings that callers may pass to one form. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from bridle.config import EngineConfig, ModelConfig
from bridle.elsewhere.names import nearest
from bridle.engine.request import StoppingCriteria
from bridle.errors import InvalidRequest, UnknownKeyword, UnsupportedFeature
from bridle.sampling import SamplingParams

#: A text, token ids, or vLLM's `{"prompt": ...}` and `{"prompt_token_ids": ...}`.
Prompt = str | Sequence[int] | Mapping[str, Any]

T = TypeVar("T")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One prompt or many as a list; a list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [_as_prompt(prompts, "prompts")]
    items = _as_list(prompts, "prompts")
    if items and all(_is_int(item) for item in items):
        return [items]
    return [_as_prompt(item, f"prompts[{i}]") for i, item in enumerate(items)]


def _as_prompt(prompt: Any, where: str) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        refuse_media(prompt.get("multi_modal_data"))
        tokens = prompt.get("prompt_token_ids")
        return _as_prompt(prompt.get("prompt") if tokens is None else tokens, where)
    tokens = _as_list(prompt, where)
    wrong = next((token for token in tokens if not _is_int(token)), None)
    if wrong is not None:
        raise InvalidRequest(f"{where} holds {wrong!r}; a prompt is a text or a list of token ids", "prompts")
    return tokens


def _as_list(value: Any, where: str) -> list[Any]:
    if hasattr(value, "tolist"):  # arrays and tensors
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    raise InvalidRequest(f"{where} is {value!r}; a prompt is a text or a list of token ids", "prompts")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def refuse_media(data: Any) -> None:
    """Raise `UnsupportedFeature` if the data holds anything but text."""
    if data:
        raise UnsupportedFeature("multi_modal_data was given; bridle reads text only", "multi_modal_data")


def per_prompt(value: T | Sequence[T], num_prompts: int, name: str) -> list[T]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(value, (list, tuple)):
        return [value] * num_prompts  # type: ignore[list-item]
    if len(value) != num_prompts:
        raise InvalidRequest(f"{name} has {len(value)} entries for {num_prompts} prompts", name)
    return list(value)


def as_sampling(value: Any) -> SamplingParams:
    """Check that it is a `SamplingParams`."""
    if not isinstance(value, SamplingParams):
        raise InvalidRequest(f"sampling is {value!r}; must be a SamplingParams", "sampling")
    return value


def as_name(value: Any, param: str) -> str | None:
    """A name, or None."""
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{param} is {value!r}; must be a name", param)
    return value


def as_criteria(value: StoppingCriteria | Sequence[StoppingCriteria] | None) -> tuple[StoppingCriteria, ...]:
    """One criterion, several or none."""
    if value is None:
        return ()
    criteria: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value,)
    for criterion in criteria:
        if not isinstance(criterion, Callable):  # type: ignore[arg-type]
            raise InvalidRequest(f"stopping_criteria holds {criterion!r}; must be callable", "stopping_criteria")
    return criteria


def split_settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments as fields of `ModelConfig` and of `EngineConfig`; unknown names are refused."""
    of_model = {field.name for field in fields(ModelConfig)} - {"model"}
    of_engine = {field.name for field in fields(EngineConfig)}
    for name in options:
        if name not in of_model | of_engine:
            close = nearest(name, of_model | of_engine, 0.6)
            hint = f"; did you mean {close!r}?" if close else ""
            raise UnknownKeyword(f"there is no setting {name!r}{hint}", name)
    model = {name: value for name, value in options.items() if name in of_model}
    return model, {name: value for name, value in options.items() if name in of_engine}
