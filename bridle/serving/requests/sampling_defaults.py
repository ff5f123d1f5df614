"""Sampling defaults of a checkpoint, from its `generation_config.json`. The defaults apply to fields that a request
leaves out. Only sampling fields and a length are read. `do_sample` is ignored, as in vLLM. If a request could not have
a value, the value is dropped with a warning. An invalid default must not prevent serving the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bridle.errors import InvalidRequest
from bridle.sampling import DEFAULT_SAMPLING, SamplingParams

_log = logging.getLogger(__name__)

#: Fields of sampling parameters, by their names in the file.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_defaults(folder: Path, mode: str = "auto") -> dict[str, Any]:
    """Return the sampling parameters that a checkpoint's folder recommends, if they differ from the usual defaults.
    If `mode` is `none`, the result is empty."""
    path = folder / "generation_config.json"
    if mode == "none" or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None  # the tokenizer reports this error
    found: dict[str, Any] = {}
    for theirs, ours in _NAMES.items() if isinstance(content, dict) else ():
        value = content.get(theirs)
        if value is None or value == getattr(DEFAULT_SAMPLING, ours):
            continue
        try:
            found[ours] = getattr(SamplingParams(**{ours: value}), ours)
        except InvalidRequest as error:
            _log.warning("ignoring %s: %s", path, error)
    if found:
        said = ", ".join(f"{name} {value:g}" for name, value in found.items())
        _log.info("default sampling parameters: %s, from %s (--generation-config none turns this off)", said, path.name)
    return found


def filled(sampling: SamplingParams, defaults: Mapping[str, Any], given: Collection[str]) -> SamplingParams:
    """Return `sampling` with the model's defaults for fields that are not in `given`. The output length is an
    exception: `limited` sets it."""
    missing = {name: value for name, value in defaults.items() if name not in given and name != "max_tokens"}
    return sampling.with_(**missing) if missing else sampling


def limited(sampling: SamplingParams, length: int | None, room: int) -> SamplingParams:
    """If `sampling` sets no limit on output tokens, return it with at most `length` tokens, but no more than the `room`
    that the prompt leaves."""
    if length is None or sampling.max_tokens is not None:
        return sampling
    return sampling.with_(max_tokens=max(min(length, room), sampling.min_tokens, 1))
