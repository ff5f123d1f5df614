"""Loads a model with a progress bar. The progress bar is printed on stderr, so that stdout has only results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from bridle.cli.signals import ending_at_once
from bridle.config import EngineConfig
from bridle.errors import InvalidRequest
from bridle.load_progress import shown

if TYPE_CHECKING:
    from bridle.config import ModelConfig
    from bridle.controller_tools import ToolExecutor
    from bridle.serving import AdapterSpec
    from bridle.serving.controller_runtime import ControlSettings
    from bridle.serving.models.loading import LoadedModel


@contextmanager
def loaded_model(
    config: ModelConfig,
    engine_config: EngineConfig | None = None,
    adapters: Sequence[AdapterSpec] = (),
    control: ControlSettings | None = None,
    more_adapters: bool = False,
    tools: ToolExecutor | None = None,
) -> Iterator[LoadedModel]:
    """Yield the loaded model of `config` with its adapters, and close the model when the block ends. `control` are the
    settings of a runtime for Wasm controllers; None starts no runtime. `more_adapters` allows adding adapters later.
    Controllers may call `tools`, which are closed with the model. Raises the errors of loading."""
    with ExitStack() as stack:
        if tools is not None:
            stack.callback(tools.close)
        with shown(f"Loading {config.model}", prints=True) as progress, ending_at_once():
            from bridle.serving.models.loading import load_model

            if adapters or more_adapters:
                from bridle.model.memory_estimate import settle_adapters

                config, engine_config = settle_adapters(config, engine_config or EngineConfig())
            elif config.reserved_memory is None:
                config = replace(config, reserved_memory=0)  # no adapter can be added later
            model = load_model(config, engine_config, progress=progress, control=control, tools=tools)
        stack.callback(model.close)
        _add_adapters(model, adapters)
        yield model


def adapter_specs(texts: Sequence[str]) -> tuple[AdapterSpec, ...]:
    """Parse the values of `--adapter`."""
    if not texts:
        return ()
    from bridle.serving import parse_adapters

    return parse_adapters(texts)


def _add_adapters(model: LoadedModel, adapters: Sequence[AdapterSpec]) -> None:
    from bridle.serving import add_adapters

    for spec in adapters:
        if spec.model not in (None, model.name):
            raise InvalidRequest(
                f"adapter {spec.name} is for model {spec.model!r}, but the loaded model is {model.name!r}", "adapter"
            )
    add_adapters(model, adapters)
