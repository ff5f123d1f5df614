"""Groups of flags that several commands share, and the checked settings they become.

Ranges are checked where the settings are made (`ModelConfig`, `EngineConfig`, `SamplingParams`), once for all
ways in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from bridle.cli.derived_options import derived_options, read_biases
from bridle.cli.units import byte_size, count, drafts
from bridle.compat.cli_flags import spellings
from bridle.config import PARK_SECONDS, DType, EngineConfig, KVCacheDType, ModelConfig, Quantization
from bridle.errors import InvalidRequest
from bridle.sampling import SamplingParams, meanings

if TYPE_CHECKING:
    from bridle.serving.models.loading import LoadedModel
    from bridle.serving.requests.controller_selection import Named

#: Warm enough to talk, where neither the command nor the checkpoint says more.
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
    """The checkpoint, and how it is loaded."""

    draft_model: Annotated[str | None, Parameter(name=spellings("--draft-model"))] = None
    (
        "A smaller model of the same vocabulary, which drafts tokens: folder, hub id or GGUF file. It changes the time "
        "and no token."
    )
    revision: str | None = None
    "Branch, tag or commit of a hub model."
    tokenizer: str | None = None
    "Folder or hub id of another tokenizer than the checkpoint's own."
    backend: Literal["torch", "llamacpp"] = "torch"
    "What computes: torch, or llama.cpp, which reads GGUF files."
    dtype: DType = "auto"
    "Type of the weights; `auto` is float32 on a CPU, the checkpoint's own on a GPU."
    device: str = "auto"
    "`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if there is one."
    quantization: Quantization = "none"
    (
        "Compress weights at load time, on a CPU: to `int8`, or GGUF's blocks `q8_0` and `q4_0`; `auto` takes the "
        "fastest that keeps 95 % of the likeliest tokens on a sample text."
    )
    kv_cache_dtype: KVCacheDType = "auto"
    (
        "Type of keys and values, on a CPU: `bfloat16` takes half of float32's memory, `int8` a little more than a "
        "quarter; `auto` is `--dtype`."
    )
    adapter_kernel: Literal["auto", "fused", "torch"] = "auto"
    "What multiplies adapters: `fused` kernels on a GPU, or plain `torch`."
    enforce_eager: bool = False
    "On a GPU: compute short steps without CUDA graphs, which take a few seconds to capture, and memory."
    max_model_len: Count = None
    "Longest sequence, prompt and output together (`32k` works). Default: what the checkpoint says."
    kv_memory: Bytes = None
    "Memory for the KV cache (`2GiB` works). Default: what the model can use, as far as the machine can spare it."
    block_size: Count = None
    "Tokens in one block of the KV cache."
    num_threads: Count = None
    "CPU threads that compute. Default: torch's choice, but no more than a container has processor time for."
    generation_config: Literal["auto", "none"] = "auto"
    "`auto`: requests get what they leave out of sampling from the checkpoint's generation_config.json."
    image_hosts: Annotated[tuple[str, ...], Parameter(name=spellings("--allow-image-host"), negative="")] = ()
    (
        "A host whose pictures requests may name by an https address: HOST[:PORT], with =NETWORK behind it if its "
        "addresses are not public; may be repeated. Default: nothing is fetched."
    )

    def to_config(self, model: str, *, warm_up: bool = True) -> ModelConfig:
        return ModelConfig(model, warm_up=warm_up, **vars(self))


@Parameter(name="*", group=BATCHING)
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a step may hold, which requests wait, and how long they may be."""

    max_num_seqs: Annotated[Count, Parameter(name=spellings("--max-num-seqs"))] = None
    "Most sequences that run at once. Default: 256."
    max_batch_prefill_tokens: Count = None
    "Most prompt tokens computed in one step. Default: 256 on a CPU, 4096 on a GPU."
    max_batch_total_tokens: Count = None
    "Tokens of all running requests that the KV cache holds. Default: as many as fit beside the largest step."
    max_num_batched_tokens: Count = None
    "Most tokens computed in one step. Default: a token for each sequence beside `--max-batch-prefill-tokens`."
    waiting_served_ratio: float | None = None
    (
        "Queued prompts wait until there are this many for each running sequence. Default: 0, so that none waits; "
        "0.3 without chunks, 1.2 if only `--max-waiting-tokens` is given."
    )
    max_waiting_tokens: Count = None
    "Most steps that queued prompts wait while others decode. Default: 20."
    chunked_prefill: bool = True
    "Compute long prompts in pieces, beside the tokens of other requests; otherwise whole, while the others pause."
    max_input_tokens: Count = None
    "Longest prompt. Default: as long as the context."
    max_total_tokens: Count = None
    "Longest prompt with its output, as `--max-model-len`, but refused if the KV cache cannot hold it."
    max_waiting: Annotated[int, Parameter(converter=count)] = 4096
    "Most requests that wait; further ones are refused until there is room."
    priority_seconds: float = 10.0
    "Seconds that a step of priority is worth: a request that has waited longer than that comes first all the same."
    speculate: Drafts = None
    (
        "Draft so many tokens at once, and keep those that are then drawn: `auto` as many as pay, `off` none. It "
        "changes the time and no token. Default: `auto` with a draft model, else `off`."
    )
    prefix_caching: bool = True
    "Keep the KV of finished prompts for requests that begin alike."
    park_memory: Bytes = None
    (
        "Memory of the KV cache that conversations in the middle of a tool call may hold back from eviction; `0` for "
        "none. Default: a quarter of it."
    )
    park_seconds: float = PARK_SECONDS
    "Seconds that the KV of a conversation waits for the result of a tool call, evicted after all else."
    unnamed_ids: bool = False
    "Also draw ids that the model has and the tokenizer does not: they leave no text."
    warm_up: bool = True
    "Run the largest step while loading, and give the KV cache what it leaves free; otherwise guess its size."

    def to_config(self) -> EngineConfig:
        given = dict(vars(self))
        del given["warm_up"]
        return EngineConfig(enable_prefix_caching=given.pop("prefix_caching"), **given)


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, kw_only=True)
class RoomOptions:
    """What a shard needs room for. A router that starts its shards itself passes these."""

    kv_tokens: Count = None
    "Tokens that the KV cache holds. Default: as many as fit beside the largest step."
    step_tokens: Count = None
    "Prompt tokens of the largest step, the router's `--max-batch-prefill-tokens`."
    step_seqs: Count = None
    "Sequences of the largest step, the router's `--max-batch-size`."
    warm_up: bool = True
    "Run the largest step while loading, so that missing memory shows at once; otherwise guess what it takes."
    reserved_memory: Bytes = None
    (
        "Memory that the KV cache leaves free for the router's adapters: on a GPU its `--adapter-memory`, on a CPU "
        "three times that and `--adapter-host-memory`. Default: none."
    )
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
    """How tokens are chosen. Sampling parameters that are not written down here are derived."""

    max_tokens: Count = 256
    "Most tokens to generate."
    temperature: float | None = None
    "0 always takes the likeliest token; higher is more varied. Default: what the checkpoint recommends, or 0.7."
    top_p: float | None = None
    "Draw among the likeliest tokens that together have this probability. Default: as recommended, or 1."
    top_k: int | None = None
    "Draw among this many likeliest tokens; 0 is all. Default: as recommended, or 0."
    min_p: float | None = None
    "Drop tokens less likely than this share of the likeliest one. Default: as recommended, or 0."
    repetition_penalty: float | None = None
    "A value above 1 discourages tokens that occurred before. Default: as recommended, or 1."
    seed: int | None = None
    "The same seed gives the same text."
    stop: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "Text that ends the output; may be given several times."
    speculate: Drafts = None
    (
        "Draft so many tokens at once, and keep those that are then drawn: `auto` as many as pay, `off` none. It "
        "changes the time and no token. Default: `auto` with a draft model, else `off`."
    )
    sampling: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    'Any sampling parameter as NAME=VALUE, its value in JSON: `watermark={"gamma": 0.5}`; may be given several times.'

    def to_params(self, model: LoadedModel | None = None, named: Named | None = None) -> SamplingParams:
        """The parameters; once the `model` is there, with what its checkpoint recommends for what was left out, and
        with what the controllers that are `named` want of its end token."""
        given = self._given()
        params = SamplingParams(**{"temperature": _USUAL_TEMPERATURE} | given)
        if model is None:
            return params
        from bridle.serving.requests.controller_selection import ignores_eos
        from bridle.serving.requests.sampling_defaults import filled

        if named is not None:
            params = params.with_(ignore_eos=ignores_eos(named, given.get("ignore_eos")))
        return filled(params, model.defaults, given)

    def _given(self) -> dict[str, Any]:
        """What the flags say, by the names of sampling parameters."""
        given = {name: value for name, value in vars(self).items() if value is not None and value != ()}
        if "logit_bias" in given:
            given["logit_bias"] = read_biases(given["logit_bias"])
        return given | _further(given.pop("sampling", ()))


def _further(given: tuple[str, ...]) -> dict[str, Any]:
    """Sampling parameters by name. A value is JSON, or else a text as it stands."""
    found: dict[str, Any] = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign or name not in meanings():
            raise InvalidRequest(f"--sampling is {item!r}; must be NAME=VALUE with a sampling parameter", "sampling")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
