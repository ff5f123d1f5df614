"""Converts the prompts, options and settings of a call to one common form. This module does not run requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from bridle.compat.cli_flags import row_of, rows_of
from bridle.compat.suggestions import nearest
from bridle.compat.vllm_calls import of_setting
from bridle.config import EngineConfig, ModelConfig
from bridle.engine.request import StoppingCriteria
from bridle.errors import InvalidRequest, UnknownKeyword, UnsupportedFeature
from bridle.multimodal import Source
from bridle.multimodal.modalities import IMAGE, VIDEO, WORDS
from bridle.sampling import SamplingParams

#: A text, token ids, or vLLM's `{"prompt": ...}` and `{"prompt_token_ids": ...}`, which may have `multi_modal_data`.
Prompt = str | Sequence[int] | Mapping[str, Any]

T = TypeVar("T")
#: Modalities by the names that `multi_modal_data` may have.
_MODALITIES = {name: modality for modality in WORDS for name in (modality, f"{modality}s")}


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt. `media` has the images, sounds and videos for the prompt's placeholders, in order."""

    prompt: str | list[int]
    pictures: tuple[Source, ...] = ()


def as_given(prompts: Prompt | Sequence[Prompt]) -> list[PromptInput]:
    """Return one prompt or several prompts as a list. A list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [_as_one(prompts, "prompts")]
    items = _as_list(prompts, "prompts")
    if items and all(_is_int(item) for item in items):
        return [PromptInput(items)]
    return [_as_one(item, f"prompts[{i}]") for i, item in enumerate(items)]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Return prompts in the form of `as_given`, for calls that read only text. Raises `UnsupportedFeature` for a prompt
    with media."""
    given = as_given(prompts)
    for each in given:
        if each.pictures:
            raise UnsupportedFeature(
                "multi_modal_data: this call reads only text; leave images, sounds and videos out", "multi_modal_data"
            )
    return [each.prompt for each in given]


def _as_one(prompt: Any, where: str) -> PromptInput:
    if isinstance(prompt, str):
        return PromptInput(prompt)
    if isinstance(prompt, Mapping):
        tokens = prompt.get("prompt_token_ids")
        pictures = as_pictures(prompt.get("multi_modal_data"))
        return PromptInput(_as_one(prompt.get("prompt") if tokens is None else tokens, where).prompt, pictures)
    tokens = _as_list(prompt, where)
    wrong = next((token for token in tokens if not _is_int(token)), None)
    if wrong is not None:
        raise InvalidRequest(f"{where} holds {wrong!r}; a prompt must be a text or a list of token ids", "prompts")
    return PromptInput(tokens)


def as_pictures(data: Any) -> tuple[Source, ...]:
    """Return the media of a prompt, in the order of the prompt's placeholders. Each of the keys `image`, `audio` and
    `video` has one medium or a list of media. A medium is bytes, a path, a `data:` URL or an array. An image may also
    be a Pillow image. A sound may also be an array with its sampling rate. A video may also be a list of images, or its
    frames with their frame rate."""
    if not data:
        return ()
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"multi_modal_data is {type(data).__name__}; must be a dict", "multi_modal_data")
    found: list[Source] = []
    for name, value in data.items():
        modality = _MODALITIES.get(name)
        if modality is None and value:
            raise UnsupportedFeature(
                f"multi_modal_data has the key {name!r}; must be one of {', '.join(WORDS)}", "multi_modal_data"
            )
        if modality is not None:
            several = _several(value, modality)
            found += [Source(_as_source(each), f"{name}[{i}]", modality=modality) for i, each in enumerate(several)]
    return tuple(found)


def _several(value: Any, modality: str) -> list[Any]:
    """Return one medium or several media as a list. An array with its sampling rate counts as one sound. A list of
    images counts as one video, unless its items are files."""
    has_rate = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float))
    is_many = isinstance(value, (list, tuple)) and not (has_rate and modality != IMAGE)
    if is_many and modality == VIDEO and not all(isinstance(each, (list, tuple, str, Path, bytes)) for each in value):
        is_many = any(getattr(each, "ndim", 0) == 4 for each in value)
    return list(value) if is_many else [] if value is None else [value]


def _as_source(value: Any) -> Any:
    """Return a text that is not a URL as the path of a file. Only programs call this function, so clients cannot name
    files."""
    is_path = isinstance(value, str) and value[:5].lower() != "data:" and "://" not in value
    return Path(value) if is_path else value


def _as_list(value: Any, where: str) -> list[Any]:
    if hasattr(value, "tolist"):  # arrays and tensors
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    raise InvalidRequest(f"{where} is {value!r}; a prompt must be a text or a list of token ids", "prompts")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def per_prompt(value: T | Sequence[T], num_prompts: int, name: str) -> list[T]:
    """Return a list with one value for each prompt. `value` is one value for all prompts, or a list with one value for
    each prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * num_prompts  # type: ignore[list-item]
    if len(value) != num_prompts:
        raise InvalidRequest(f"{name} has {len(value)} entries for {num_prompts} prompts", name)
    return list(value)


def crews(value: Any, num_prompts: int) -> list[tuple[object, ...]]:
    """Return the controllers of each prompt. `value` is one list for all prompts, or a list of lists."""
    if value is None:
        return [()] * num_prompts
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"controllers is {value!r}; must be a list of controllers", "controllers")
    if not any(isinstance(each, (list, tuple)) for each in value):
        return [tuple(value)] * num_prompts
    return [() if each is None else tuple(each) for each in per_prompt(value, num_prompts, "controllers")]


def as_sampling(value: Any) -> SamplingParams:
    """Return `value` if it is a `SamplingParams`; raise `InvalidRequest` otherwise."""
    if not isinstance(value, SamplingParams):
        raise InvalidRequest(f"sampling is {value!r}; must be a SamplingParams", "sampling")
    return value


def as_name(value: Any, param: str) -> str | None:
    """Return a name or None unchanged; raise `InvalidRequest` for other types."""
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{param} is {value!r}; must be a name", param)
    return value


def as_criteria(value: StoppingCriteria | Sequence[StoppingCriteria] | None) -> tuple[StoppingCriteria, ...]:
    """Return one stopping criterion, several or none as a tuple."""
    if value is None:
        return ()
    criteria: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value,)
    for criterion in criteria:
        if not isinstance(criterion, Callable):  # type: ignore[arg-type]
            raise InvalidRequest(f"stopping_criteria holds {criterion!r}; each must be callable", "stopping_criteria")
    return criteria


def _of_a_server(name: str, known: Collection[str]) -> str:
    """Return advice on bridle's equivalent of another server's setting (vLLM's first), or an empty string. A name that
    is similar to a setting in `known` counts as a misspelling of that setting."""
    if advice := of_setting(name):
        return f": {advice}"
    flag = "--" + name.replace("_", "-")
    row = row_of("vLLM", flag) or next(iter(rows_of(flag)), None)
    if row is None or (row.is_family and nearest(name, known) is not None):
        return ""
    here = _setting(row.here)
    if here in known:
        return f"; here it is {here!r}"
    if row.here:
        return f": `bridle serve` has {row.here}"
    return ": " + re.sub(r"--[a-z][a-z-]*", lambda found: _in_python(found[0], known), row.why)


def _in_python(flag: str, known: Collection[str]) -> str:
    """Return a flag in an advice text as the equivalent Python setting, or unchanged if there is none."""
    return f"`{_setting(flag)}`" if _setting(flag) in known else flag


def _setting(flag: str) -> str:
    """Return the name of a command-line flag as a Python keyword."""
    return flag.partition(" ")[0].removeprefix("--").replace("-", "_")


def split_settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into fields of `ModelConfig` and fields of `EngineConfig`; raise an error for unknown
    names."""
    of_model = {field.name for field in fields(ModelConfig)} - {"model"}
    of_engine = {field.name for field in fields(EngineConfig)}
    for name in options:
        if name not in of_model | of_engine:
            close = nearest(name, of_model | of_engine, 0.6)
            told = _of_a_server(name, of_model | of_engine)
            hint = f"; did you mean {close!r}?" if close and not told else told
            raise UnknownKeyword(f"there is no setting {name!r}{hint}", name)
    model = {name: value for name, value in options.items() if name in of_model}
    return model, {name: value for name, value in options.items() if name in of_engine}
