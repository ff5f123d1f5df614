"""The fields of a Ray Serve configuration file for a model. The fields are validated before any process is started."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bridle.config import EngineConfig, ModelConfig
from bridle.errors import InvalidRequest
from bridle.serving.controller_runtime import ControlSettings

_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]
_OF_TOKENIZERS = ("revision", "tokenizer", "mmproj")
_OF_FRONTS = (
    *("model", "name", "adapters", "max_requests", "request_timeout", "strict_fields", "keys", "control_store"),
    *("tools", "policies"),
)
_Share = Annotated[float, Field(gt=0, le=1)]


class RaySettings(BaseModel):
    """The settings of one model on a Ray cluster, with its engines and fronts.

    `model_options` are fields of `ModelConfig`; `engine_options` are fields of `EngineConfig`. `adapters` maps names of
    LoRA adapters to folders or hub ids. An engine has `shards` processes for its model, and uses `num_cpus` and
    `num_gpus` for each process. With 0 shards, the replica's own process computes the model; 2 or more shards are
    tensor parallelism on one machine. Engines are added if more than `target_queued_tokens` prompt tokens are queued
    per engine, or if more than the share `target_busy` of the possible sequences run. Below both targets, engines are
    removed. If `control_store` is set, a folder of Wasm controllers that all machines share, each engine has its own
    control runtime. `tools` and `policies` are files in the format of `bridle serve`; fronts read them.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = "demo"
    name: str | None = None
    model_options: dict[str, Any] = {}
    engine_options: dict[str, Any] = {}
    adapters: dict[str, str] = {}

    shards: Annotated[int, Field(ge=0)] = 0
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    min_engines: _Count = 1
    max_engines: _Count = 1
    initial_engines: _Count | None = None
    target_queued_tokens: _Count = 8192
    target_busy: _Share = 0.8
    upscale_delay: _Seconds = 10.0
    downscale_delay: _Seconds = 300.0
    drain: _Seconds = 60.0

    fronts: _Count = 1
    front_cpus: Annotated[float, Field(ge=0)] = 0.0
    max_requests: _Count = 512
    request_timeout: Annotated[float, Field(gt=0)] | None = None
    strict_fields: bool = False
    keys: str | None = None
    control_store: str | None = None
    tools: str | None = None
    policies: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> RaySettings:
        if self.max_engines < self.min_engines:
            raise ValueError(f"max_engines is {self.max_engines}; must be at least min_engines, {self.min_engines}")
        initial = self.initial_engines
        if initial is not None and not self.min_engines <= initial <= self.max_engines:
            raise ValueError(f"initial_engines is {initial}; must be from {self.min_engines} to {self.max_engines}")
        self.to_model()
        self.to_engine()
        return self

    @classmethod
    def parse(cls, args: dict[str, Any]) -> RaySettings:
        """Validate the fields. Raises `InvalidRequest` that names the invalid field."""
        try:
            return cls.model_validate(args)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "args"
            raise InvalidRequest(f"{where}: {first['msg']}", where) from None

    def to_model(self) -> ModelConfig:
        """Return the model configuration of each engine."""
        _check_names("model_options", self.model_options, ModelConfig, {"model"})
        options = dict(self.model_options)
        if self.num_cpus and "num_threads" not in options:
            options["num_threads"] = max(int(self.num_cpus), 1)
        return ModelConfig(self.model, **options)

    def to_engine(self) -> EngineConfig:
        """Return the scheduling configuration of each engine."""
        _check_names("engine_options", self.engine_options, EngineConfig, set())
        return EngineConfig(**self.engine_options)

    def to_control(self) -> ControlSettings:
        """Return the settings of each engine's control runtime. A front's own runtime only handles uploads and tags."""
        if self.control_store is None:
            return ControlSettings("off")
        return ControlSettings("on", store=Path(self.control_store))

    def for_fronts(self) -> RaySettings:
        """Return the settings that a front needs. Serve replaces a front when these settings change, not when engines
        change."""
        options = {name: value for name, value in self.model_options.items() if name in _OF_TOKENIZERS}
        told = {name: getattr(self, name) for name in _OF_FRONTS}
        return RaySettings(model_options=options, **told)

    @property
    def bundle(self) -> dict[str, float]:
        """Return the resources of a machine that one engine needs for all of its processes."""
        count = max(self.shards, 1)
        return {"CPU": count * self.num_cpus} | ({"GPU": count * self.num_gpus} if self.num_gpus else {})


def _check_names(what: str, given: dict[str, Any], kind: type, taken: set[str]) -> None:
    known = {field.name for field in fields(kind)} - taken
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{what} has no field {unknown[0]!r}; known are {', '.join(sorted(known))}")
