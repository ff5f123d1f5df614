"""Groups of flags that several commands share, and their conversion to validated settings.

The settings themselves validate ranges (`ModelConfig`, `EngineConfig`, `SamplingParams`), so that the command line and
the Python API have the same rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from bridle.cli.derived_options import derived_options, read_biases, read_scales
from bridle.cli.units import byte_size, count, drafts
from bridle.compat.cli_flags import spellings
from bridle.config import PARK_SECONDS, DType, EngineConfig, KVCacheDType, ModelConfig, Quantization
from bridle.errors import InvalidRequest
from bridle.sampling import SamplingParams, meanings

if TYPE_CHECKING:
    from bridle.serving.models.loading import LoadedModel
    from bridle.serving.requests.steering import Named

#: The default temperature, if neither the command nor the checkpoint sets one. It suits conversations.
_USUAL_TEMPERATURE = 0.7
MODEL = Group("Model", sort_key=10)
BATCHING = Group("Batching", sort_key=20)
SAMPLING = Group("Sampling", sort_key=15)

Count = Annotated[int | None, Parameter(converter=count)]
Bytes = Annotated[int | None, Parameter(converter=byte_size)]
Files = Annotated[tuple[Path, ...], Parameter(negative="")]
Drafts = Annotated[int | None, Parameter(name=spellings("--speculate"), converter=drafts)]


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the checkpoint and for loading it."""

    draft_model: Annotated[str | None, Parameter(name=spellings("--draft-model"))] = None
    "Smaller model with the same vocabulary that drafts tokens: folder, hub id or GGUF file. The output is unchanged."
    revision: str | None = None
    "Branch, tag or commit of a hub model."
    tokenizer: str | None = None
    "Folder or hub id of a tokenizer that replaces the checkpoint's own."
    mmproj: Annotated[str | None, Parameter(name="--mmproj")] = None
    "GGUF file with the vision tower of a GGUF model. Default: the only `mmproj` file next to the model."
    backend: Literal["torch", "llamacpp"] = "torch"
    "Library that computes the model: `torch`, or `llamacpp` for GGUF files."
    dtype: DType = "auto"
    "Type of the weights; `auto` is float32 on a CPU and the checkpoint's own type on a GPU."
    device: str = "auto"
    "Device to use: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if there is one."
    quantization: Quantization = "none"
    """Type to which a CPU compresses weights while loading: `int8`, or GGUF's `q8_0` or `q4_0`. `auto` takes the
    fastest type that keeps the most likely token at 95 % of the positions of a sample text."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Type of the KV cache on a CPU: `bfloat16` needs half as much memory as float32, `int8` about a quarter. `auto` is
    the type of `--dtype`."""
    adapter_kernel: Literal["auto", "fused", "torch"] = "auto"
    "Implementation of LoRA: `fused` kernels on a GPU, or `torch`."
    enforce_eager: bool = False
    "Disable CUDA graphs, which take some seconds and memory to capture."
    max_model_len: Count = None
    "Maximum length of a sequence, prompt and output together, such as `32k`. Default: the checkpoint's limit."
    kv_memory: Bytes = None
    "Memory for the KV cache, such as `2GiB`. Default: as much as the model can use and the machine has."
    block_size: Count = None
    "Number of tokens in one block of the KV cache."
    num_threads: Count = None
    "Number of CPU threads. Default: torch's choice, limited by the container's CPU quota."
    generation_config: Literal["auto", "none"] = "auto"
    "Sampling defaults for requests: `auto` reads the checkpoint's generation_config.json, `none` ignores it."
    image_hosts: Annotated[tuple[str, ...], Parameter(name=spellings("--allow-image-host"), negative="")] = ()
    """Host from which requests may load images over https: HOST[:PORT], or HOST[:PORT]=NETWORK if the host's addresses
    are not public. Repeatable. Default: none."""
    control_vectors: Annotated[tuple[str, ...], Parameter(name="--load-control-vector", negative="")] = ()
    "Control vector that requests may scale: [MODEL:]NAME=FILE with a GGUF or safetensors file. Repeatable."
    tool_format: str = "auto"
    "Format of tool calls: a name such as `hermes`, or a JSON file. `auto` infers it from the chat template."
    reasoning_format: str = "auto"
    "Tags around reasoning: a name such as `deepseek_r1`. `auto` infers them from the chat template."
    tool_prompt: Literal["describe", "refuse"] = "describe"
    """Handling of tools that the chat template leaves out: `describe` them in the system message, or `refuse` the
    request. The request field `tool_prompt` overrides it."""
    thinking_budget_message: str = ""
    """Last sentence of the reasoning if a request's `thinking_budget` runs out. The request field
    `thinking_budget_message` overrides it. Default: none."""
    max_repeated_calls: int = 0
    """Number of equal tool calls in a row, with equal results, after which the model must answer without tools. It ends
    the endless loops of small models. Default: 0, no limit."""
    bare_calls: bool = True
    "If an answer begins with the JSON of a tool call, treat it as a call even without the format's markup."
    parse_special_text: Annotated[bool, Parameter(negative="")] = False
    "Tokenize the text of a special token in a message, such as `<eos>`, as that token. By default it stays plain text."

    def to_config(self, model: str, *, warm_up: bool = True) -> ModelConfig:
        from bridle.chat.tool_parsers.presets import check_names

        check_names(self.tool_format, self.reasoning_format)
        return ModelConfig(model, warm_up=warm_up, **vars(self))

    def check_backend(self, model: str) -> None:
        """Raise an error for settings that the backend does not support, before bridle looks for the model."""
        from bridle.backends import check_backend

        check_backend(self.to_config(model))


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, kw_only=True)
class TraceModelOptions(ModelOptions):
    """Options for the model, or only its vocabulary, on which traces are replayed."""

    tokenizer: str | None = None
    """Model whose tokenizer made the traces: folder, hub id or `demo`. With --model, it replaces that model's
    tokenizer. Default: demo."""


@Parameter(name="*", group=BATCHING)
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits on a step, on the number of waiting requests, and on the length of requests."""

    max_num_seqs: Annotated[Count, Parameter(name=spellings("--max-num-seqs"))] = None
    "Maximum number of sequences that run at once. Default: 256."
    max_batch_prefill_tokens: Count = None
    "Maximum number of prompt tokens in one step. Default: 256 on a CPU, 4096 on a GPU."
    max_batch_total_tokens: Count = None
    "Size of the KV cache in tokens. Default: what memory allows."
    max_num_batched_tokens: Count = None
    "Maximum number of tokens in one step. Default: `--max-batch-prefill-tokens` plus one for each sequence."
    waiting_served_ratio: float | None = None
    """Hold queued prompts back until this many are queued for each running sequence. Default: 0; 0.3 without chunked
    prefill; 1.2 if only `--max-waiting-tokens` is set."""
    max_waiting_tokens: Count = None
    "Maximum number of steps for which queued prompts are held back. Default: 20."
    chunked_prefill: bool = True
    """Compute long prompts in chunks, in the same steps as the tokens of other requests. Otherwise, other requests
    pause while a prompt is computed."""
    max_input_tokens: Count = None
    "Maximum length of a prompt in tokens. Default: the context length."
    max_total_tokens: Count = None
    """Maximum length of prompt and output together, in tokens. Unlike with `--max-model-len`, startup fails if the KV
    cache cannot hold this length."""
    max_waiting: Annotated[int, Parameter(converter=count)] = 4096
    "Maximum number of waiting requests. Further requests are rejected."
    priority_seconds: float = 10.0
    "Seconds of waiting that improve a request's priority by one step."
    speculate: Drafts = None
    """Draft tokens per step: a number, `auto` or `off`. The output is unchanged. Default: `auto` with a draft model,
    else `off`."""
    allow_probes: bool = False
    "Let controllers read how far hidden states point along control vectors (the request field `probes`)."
    prefix_caching: bool = True
    "Reuse the KV cache of finished prompts for prompts with the same beginning."
    park_memory: Bytes = None
    "Maximum KV memory that conversations keep during tool calls; `0` for none. Default: a quarter of the KV cache."
    park_seconds: float = PARK_SECONDS
    "Seconds for which a conversation's KV is kept during a tool call."
    max_retained: Annotated[int, Parameter(converter=count)] = 64
    """Maximum number of prompts that a user keeps in the KV cache, with prompt caches and breakpoints of
    `cache_control`."""
    max_retained_tokens: Count = None
    "Maximum number of tokens in a user's kept prompts (`--max-retained`). Default: half of `--park-memory`."
    kv_store: str | None = None
    """Folder for KV blocks that leave memory, so that prompts are not computed again, even after a restart. DIR, `auto`
    for a folder in the user's cache, or `off`. Default: `auto` on a server without keys, else `off`."""
    kv_store_bytes: Bytes = None
    "Maximum size of the folder of `--kv-store`. Default: 8 GiB, or a tenth of the free disk if that is less."
    kv_store_key: str | None = None
    "File with a key of 64 hexadecimal digits that encrypts the folder of `--kv-store`."
    kv_store_format: Literal["exact", "int8"] = "exact"
    "Format of stored KV blocks: `exact`, or `int8`, which is approximate and smaller."
    kv_host_bytes: Annotated[int, Parameter(converter=byte_size)] = 0
    "Host memory for KV blocks that leave the GPU's memory, such as `32GiB`; `0` for none."
    unnamed_ids: bool = False
    "Let the model sample token ids that the tokenizer does not have. They produce no text."
    warm_up: bool = True
    """Run the largest step while loading, and size the KV cache by the memory that is left. Otherwise, the size is
    estimated."""

    def to_config(self) -> EngineConfig:
        given = dict(vars(self))
        del given["warm_up"]
        return EngineConfig(enable_prefix_caching=given.pop("prefix_caching"), **given)


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """Options for the memory that a shard reserves, which a router passes to the shards that it starts."""

    kv_tokens: Count = None
    "Size of the KV cache in tokens. Default: what memory allows."
    step_tokens: Count = None
    "Maximum number of prompt tokens in one step: the value of the server's `--max-batch-prefill-tokens`."
    step_seqs: Count = None
    "Maximum number of sequences in one step: the value of the server's `--max-num-seqs`."
    warm_up: bool = True
    "Run the largest step while loading, so that missing memory is noticed at once. Otherwise, memory is estimated."
    reserved_memory: Bytes = None
    """Memory to leave free for adapters: on a GPU the server's `--adapter-memory`, on a CPU three times that plus
    `--adapter-host-memory`. Default: none."""
    num_blocks: Annotated[Count, Parameter(show=False)] = None
    max_kv_memory: Annotated[Bytes, Parameter(show=False)] = None
    num_sharers: Annotated[int, Parameter(show=False)] = 1
    kernel: Annotated[str, Parameter(show=False)] = "auto"

    def add_to(self, config: ModelConfig) -> ModelConfig:
        return replace(config, **{field.name: getattr(self, field.name) for field in fields(self)})


if TYPE_CHECKING:
    _Derived = object
else:
    _Derived = derived_options()


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingOptions(_Derived):
    """Options for sampling. Flags that this class does not declare are derived from `SamplingParams`."""

    max_tokens: Count = 256
    "Maximum number of output tokens."
    temperature: float | None = None
    "Sampling temperature; 0 always takes the most likely token. Default: the checkpoint's value, or 0.7."
    top_p: float | None = None
    "Sample from the most likely tokens whose probabilities add up to this. Default: the checkpoint's value, or 1."
    top_k: int | None = None
    "Sample from this number of most likely tokens; 0 for all. Default: the checkpoint's value, or 0."
    min_p: float | None = None
    "Exclude tokens whose probability is below this fraction of the highest one. Default: the checkpoint's value, or 0."
    repetition_penalty: float | None = None
    "Penalty for repeated tokens; values above 1 discourage them. Default: the checkpoint's value, or 1."
    seed: int | None = None
    "Random seed; the same seed gives the same output."
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Text that ends the output. Repeatable."
    speculate: Drafts = None
    """Draft tokens per step: a number, `auto` or `off`. The output is unchanged. Default: `auto` with a draft model,
    else `off`."""
    sampling: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    'Any sampling parameter as NAME=VALUE with a JSON value, such as `watermark={"gamma": 0.5}`. Repeatable.'

    def to_params(self, model: LoadedModel | None = None, named: Named | None = None) -> SamplingParams:
        """Return the sampling parameters. If `model` is given, the recommendations of its checkpoint replace missing
        values. The default of `ignore_eos` depends on the controllers in `named`."""
        given = self._given()
        params = SamplingParams(**{"temperature": _USUAL_TEMPERATURE} | given)
        if model is None:
            return params
        from bridle.serving.requests.sampling_defaults import filled
        from bridle.serving.requests.steering import ignores_eos

        if named is not None:
            params = params.with_(ignore_eos=ignores_eos(named, given.get("ignore_eos")))
        return filled(params, model.defaults, given)

    def _given(self) -> dict[str, Any]:
        """Return the sampling parameters of the given flags, by name."""
        given = {name: value for name, value in vars(self).items() if value is not None and value != ()}
        if "logit_bias" in given:
            given["logit_bias"] = read_biases(given["logit_bias"])
        if "control_vectors" in given:
            given["control_vectors"] = read_scales(given["control_vectors"])
        return given | _further(given.pop("sampling", ()))


def _further(given: tuple[str, ...]) -> dict[str, Any]:
    """Parse the values of `--sampling`. Returns the sampling parameters by name; a value that is not JSON is plain
    text."""
    found: dict[str, Any] = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign or name not in meanings():
            raise InvalidRequest(
                f"--sampling is {item!r}; must be NAME=VALUE, where NAME is a sampling parameter", "sampling"
            )
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
