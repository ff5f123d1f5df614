"""Loads the model of an `LLM`."""

from __future__ import annotations

from typing import Any

from bridle.config import EngineConfig, ModelConfig
from bridle.controller_tools import ToolExecutor
from bridle.errors import InvalidRequest
from bridle.llm import arguments
from bridle.load_progress import Report
from bridle.model.hub_lookup import check_available
from bridle.serving import ControlSettings, LoadedModel, as_control, load_model


def load(
    model: Any,
    engine_config: EngineConfig | None,
    control: ControlSettings | bool | None,
    settings: dict[str, Any],
    has_adapters: bool,
    tools: ToolExecutor | None,
    report: Report,
) -> LoadedModel:
    """The model that `model` names, with `settings` for it and for its engine; one that is loaded already is used as it
    is. Raises `InvalidRequest` for settings that contradict each other."""
    of_model, of_engine = arguments.split_settings(settings)
    if isinstance(model, LoadedModel) and (settings or engine_config or control or tools):
        raise InvalidRequest(f"settings were given for {model.name!r}, which is loaded already", "model")
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, ModelConfig) and of_model:
        name = next(iter(of_model))
        raise InvalidRequest(f"{name!r} was given beside a ModelConfig; set it there", name)
    if engine_config is not None and of_engine:
        name = next(iter(of_engine))
        raise InvalidRequest(f"{name!r} was given beside an EngineConfig; set it there", name)
    config = model if isinstance(model, ModelConfig) else ModelConfig(str(model), **of_model)
    engine = engine_config or EngineConfig(**of_engine)
    check_available(config.model, config.revision)  # says which name may be meant; a server's clients are not told
    if has_adapters or engine.adapter_memory is not None:
        from bridle.model.memory_estimate import settle_adapters

        config, engine = settle_adapters(config, engine)
    return load_model(config, engine, progress=report, control=as_control(control), tools=tools)
