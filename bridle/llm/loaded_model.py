"""A model that a program has loaded: loading, inspection, adapters, controllers, and closing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bridle import serving
from bridle.backends import check_backend
from bridle.chat.chat_format import learn
from bridle.chat.tool_parsers.presets import check_names
from bridle.config import EngineConfig, ModelConfig
from bridle.controller_tools import DEFAULT_LIMITS, ToolExecutor, ToolLimits, function_tools
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.statistics import EngineStatistics
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.llm import arguments
from bridle.llm.calls import Calls
from bridle.llm.requests import NO_CONTROL
from bridle.load_progress import Report, shown
from bridle.logs import hide_variables
from bridle.model.hub_lookup import check_available
from bridle.sampling import SamplingParams
from bridle.serving.policies import PolicySet, read_policies
from bridle.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bridle.control_vectors import ControlVectorInfo, ControlVectors


class LoadedModelMixin:
    """A loaded model and its engine. The calls of the model are made through `_calls`."""

    def __init__(
        self,
        model: str | ModelConfig | serving.LoadedModel = "demo",
        *,
        sampling: SamplingParams | None = None,
        engine_config: EngineConfig | None = None,
        control: serving.ControlSettings | bool | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        tools: Mapping[str, Callable[..., Any]] | None = None,
        tool_limits: ToolLimits = DEFAULT_LIMITS,
        policies: PolicySet | Mapping[str, Any] | str | Path | None = None,
        use_tqdm_on_load: bool = True,
        **settings: Any,
    ) -> None:
        """`model` is a folder, a hub id, `demo`, a configuration, or a model that `load_model` loaded. `settings` are
        fields of `ModelConfig` and `EngineConfig`, such as `dtype` or `max_num_seqs`. `sampling` is the default for
        calls without sampling parameters. With `control` True, a runtime for Wasm controllers is started in a separate
        process. `adapters` are LoRA adapters by name; each is a folder or a hub id. Memory is reserved for these
        adapters, and for adapters that `load_adapter` adds later. An empty mapping ({}) reserves memory only for
        adapters that are loaded later. `tools` are functions by name that controllers may call (`view.tool`), within
        `tool_limits`. `policies` apply to all outputs, as with `bridle serve --policies`. `policies` is a TOML file, or
        the parsed content of one. With `use_tqdm_on_load`, progress is shown while the model loads: a bar if stderr is
        a terminal, else lines in the log. Raises `UnsupportedModel` or `InvalidRequest`; the message names the next
        step."""
        hide_variables()
        usual = None if sampling is None else arguments.as_sampling(sampling)
        demanded = policies if policies is None or isinstance(policies, PolicySet) else read_policies(policies)
        self._tools = None if tools is None else ToolExecutor(function_tools(tools, tool_limits), tool_limits)
        with shown(
            f"Loading {model}", is_wanted=use_tqdm_on_load and not isinstance(model, serving.LoadedModel)
        ) as report:
            self._model = _load(model, engine_config, control, settings, adapters is not None, self._tools, report)
        if demanded is not None:
            self._model = copy.copy(self._model)
            self._model.policies = demanded
        self._calls = Calls(self._model, usual)
        try:
            for name, source in (adapters or {}).items():
                self.load_adapter(name, source)
        except BaseException:
            if not isinstance(model, serving.LoadedModel):
                self.close()
            raise

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Return the model's short name."""
        return self._model.name

    @property
    def info(self) -> ExecutorInfo:
        """Return the sizes and limits of the loaded model."""
        return self._model.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._model.tokenizer

    @property
    def model(self) -> serving.LoadedModel:
        """Return the model together with its engine client, in the form that servers use."""
        return self._model

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the engine's counters."""
        return self._model.client.statistics()

    # -- adapters --------------------------------------------------------------------------------------------

    def load_adapter(
        self, name: str, source: str | Path, revision: str | None = None, *, replace: bool = False
    ) -> serving.AdapterInfo:
        """Load the LoRA adapter in a folder or hub repository. Requests use the adapter with `generate(...,
        adapter=name)`. Running requests continue while the adapter loads. With `replace`, the adapter replaces an
        adapter of the same name. Running requests continue to use the replaced adapter. Raises `AdapterRefused` with
        the reason for an adapter that cannot be applied."""
        self._model.check_process()
        if replace:
            return self._model.adapters.replace(name, str(source), revision)
        serving.add_adapters(self._model, [serving.AdapterSpec(name, str(source), revision)])
        return self._model.adapters.get(name)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that use the adapter continue to their end. Raises `UnknownAdapter`."""
        self._model.adapters.remove(name)

    @property
    def adapters(self) -> tuple[serving.AdapterInfo, ...]:
        """Return the adapters that requests may choose."""
        return self._model.adapters.list()

    # -- pauses ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Pause the engine: it computes nothing until `resume`. The engine still accepts requests, and running requests
        keep their KV."""
        self._model.pause()

    def resume(self) -> None:
        """Continue after `pause`. The pause does not change the outputs."""
        self._model.resume()

    # -- control vectors -------------------------------------------------------------------------------------

    def load_control_vector(self, name: str, source: str | Path) -> ControlVectorInfo:
        """Load a control vector from a GGUF or safetensors file. Requests use the vector with `generate(...,
        control_vectors={name: scale})`. Running requests keep the vector that had the same name before. Raises
        `InvalidRequest` if the file does not fit the model."""
        self._model.check_process()
        return self._vectors.add(name, source)

    def unload_control_vector(self, name: str) -> None:
        """Remove a control vector. Requests that use the vector continue to their end. Raises
        `UnknownControlVector`."""
        self._vectors.remove(name)

    @property
    def control_vectors(self) -> tuple[ControlVectorInfo, ...]:
        """Return the control vectors that requests may scale."""
        return self._vectors.list()

    @property
    def _vectors(self) -> ControlVectors:
        return self._model.require_control_vectors()

    # -- controllers -----------------------------------------------------------------------------------------

    def upload(self, wasm: bytes | str | Path, tags: Sequence[str] = ()) -> str:
        """Compile and store a Wasm controller, given as bytes or a file. Return the id to pass to `WasmController`.
        `tags` are further names for the controller. Needs `control`. Raises `InvalidRequest` if `wasm` is not a
        controller."""
        self._model.check_process()
        data = wasm if isinstance(wasm, bytes) else Path(wasm).read_bytes()
        control = self._model.control
        if control is None:
            raise UnsupportedFeature(NO_CONTROL, "control")
        module = serving.upload_module(control, data, serving.LOCAL_ADMIN).module_id
        if tags:
            serving.tag_module(control, module, tags, serving.LOCAL_ADMIN)
        return module

    # -- life ------------------------------------------------------------------------------------------------

    def close(self, drain: float = 0.0) -> None:
        """Free the model. Running requests get `drain` seconds to finish. Idempotent."""
        self._model.close(drain)
        if self._tools is not None:
            self._tools.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _load(
    model: Any,
    engine_config: EngineConfig | None,
    control: serving.ControlSettings | bool | None,
    settings: dict[str, Any],
    has_adapters: bool,
    tools: ToolExecutor | None,
    report: Report,
) -> serving.LoadedModel:
    """Load the model that `model` names, with `settings` for the model and its engine. A model that is already loaded
    is used unchanged. Raises `InvalidRequest` for settings that contradict each other."""
    of_model, of_engine = arguments.split_settings(settings)
    if isinstance(model, serving.LoadedModel) and (settings or engine_config or control or tools):
        raise InvalidRequest(f"leave out settings for the model {model.name!r}, which is loaded already", "model")
    if isinstance(model, serving.LoadedModel):
        return model
    if isinstance(model, ModelConfig) and of_model:
        name = next(iter(of_model))
        raise InvalidRequest(f"{name!r} was given together with a ModelConfig; set it in the ModelConfig", name)
    if engine_config is not None and of_engine:
        name = next(iter(of_engine))
        raise InvalidRequest(f"{name!r} was given together with an EngineConfig; set it in the EngineConfig", name)
    config = model if isinstance(model, ModelConfig) else ModelConfig(str(model), **of_model)
    engine = engine_config or EngineConfig(**of_engine)
    check_names(config.tool_format, config.reasoning_format)
    check_backend(config)
    check_available(config.model, config.revision)  # says which name may be meant; a server's clients are not told
    if has_adapters or engine.adapter_memory is not None:
        from bridle.model.memory_estimate import settle_adapters

        config, engine = settle_adapters(config, engine)
    loaded = serving.load_model(config, engine, progress=report, control=serving.as_control(control), tools=tools)
    if loaded.pooling is None:
        learn(loaded)
    return loaded
