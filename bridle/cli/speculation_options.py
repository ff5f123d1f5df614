"""vLLM's flag `--speculative-config`, for users of vLLM's command line."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from bridle.cli.options import BATCHING
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.http.settings import ServeSettings

#: The keys that bridle accepts. Values for the n-gram search have no effect: bridle adapts the search to its success.
_KEYS = frozenset({"method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"})
_METHODS = (None, "ngram", "draft_model")


@Parameter(name="*", group=BATCHING)
@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Options for draft tokens, in vLLM's format."""

    speculative_config: str | None = None
    """Settings of speculative decoding as JSON, like vLLM's: `method` (ngram or draft_model), `num_speculative_tokens`,
    `model`."""

    def add_to(self, settings: ServeSettings) -> ServeSettings:
        """Return the settings of a server with the draft settings from the flag's JSON."""
        if self.speculative_config is None:
            return settings
        given = _read(self.speculative_config)
        if settings.engine.speculate is not None or settings.model.draft_model is not None:
            raise InvalidRequest(
                "speculative_config cannot be combined with speculate or draft_model; use one of them",
                "speculative_config",
            )
        count = given.get("num_speculative_tokens")
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise InvalidRequest(f"num_speculative_tokens is {count!r}; must be an integer", "speculative_config")
        draft_model = given.get("model") if given.get("method") != "ngram" else None
        return replace(
            settings,
            model=replace(settings.model, draft_model=draft_model),
            engine=replace(settings.engine, speculate=count),
        )


def _read(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest(f"speculative_config is {text[:80]!r}; must be a JSON object", "speculative_config")
    for name in given.keys() - _KEYS:
        known = ", ".join(sorted(_KEYS))
        raise InvalidRequest(
            f"speculative_config has the key {name[:80]!r}; allowed keys are {known}", "speculative_config"
        )
    if given.get("method") not in _METHODS:
        raise InvalidRequest(
            f"speculative_config: method is {str(given['method'])[:80]!r}; must be ngram or draft_model",
            "speculative_config",
        )
    if not isinstance(given.get("model", ""), str) or ("model" in given and not given["model"]):
        raise InvalidRequest("speculative_config: model must be the name of a model, as a text", "speculative_config")
    if given.get("method") == "draft_model" and "model" not in given:
        raise InvalidRequest(
            "speculative_config has the method draft_model without a model; add the key model", "speculative_config"
        )
    if given.get("method") is None and "model" not in given:
        raise InvalidRequest(
            "speculative_config has neither a method nor a model; add one of them", "speculative_config"
        )
    return given
