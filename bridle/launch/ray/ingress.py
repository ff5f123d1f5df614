"""One front of a Ray cluster: a replica in Ray Serve that answers HTTP like `bridle serve`, but computes no model.

A front validates, tokenizes, admits and streams requests, and compiles constraints. Fronts share no state, so their
number is not limited.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from bridle.http.app import create_app
from bridle.http.settings import HttpSettings
from bridle.launch.ray.adapters import far_registry
from bridle.launch.ray.client import ClusterClient
from bridle.launch.ray.files import tools_of
from bridle.launch.ray.settings import RaySettings
from bridle.logs import configure_logs
from bridle.serving import LoadedModel, ModelRegistry, model_name
from bridle.serving.controller_runtime import finish_control
from bridle.serving.models.model_components import begin_control_of, constraint_pool, load_tokenizer
from bridle.serving.policies import PolicyRegistry
from bridle.serving.requests.sampling_defaults import read_defaults
from bridle.serving.tenancy.keys import KeyStore


class Front:
    """The front in one replica's process; Ray Serve creates it. `told` is `RaySettings` as JSON. `version` changes with
    the operator's files, because Serve replaces fronts when an argument changes."""

    async def __init__(self, told: str, engines: Any, version: str = "") -> None:  # type: ignore[misc]  # Serve awaits it
        from bridle.model import resolve_model
        from bridle.model.pooling.settings import read_pooling

        configure_logs("json")
        self._settings = settings = RaySettings.model_validate_json(told)
        config = settings.to_model()
        folder = resolve_model(config.model, config.revision)
        tokenizer = load_tokenizer(config, folder)
        store = begin_control_of(settings.to_model(), folder, replace(settings.to_control(), prepare=True))
        tools = tools_of(settings)
        self._policies = None if settings.policies is None else PolicyRegistry(Path(settings.policies))
        client = await ClusterClient.connect(engines, tools)
        control = await asyncio.to_thread(finish_control, settings.to_control(), store, client.info.vocab_size)
        if control is not None:
            control.is_store = True
        constraints = constraint_pool(tokenizer, client.info)

        def shut_down(drain: float) -> None:
            client.close(drain)
            tools.close()
            constraints.shutdown()
            if control is not None:
                control.shutdown()

        name = settings.name or model_name(config.model)
        adapters = far_registry(settings.adapters, (name, config.model))
        model = LoadedModel(
            name,
            client,
            tokenizer,
            adapters=adapters,
            control=control,
            constraints=constraints,
            defaults=read_defaults(folder, config.generation_config),
            pooling=read_pooling(folder),
            tools=tools,
            shutdown=shut_down,
        )
        self._registry = ModelRegistry([model])

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._settings
        http = HttpSettings(
            max_requests=settings.max_requests,
            request_timeout=settings.request_timeout,
            strict_fields=settings.strict_fields,
            policies=self._policies,
        )
        keys = None if settings.keys is None else KeyStore(Path(settings.keys))
        return create_app(self._registry, http, keys)

    def __del__(self) -> None:
        registry = getattr(self, "_registry", None)
        if registry is not None:
            registry.close()
