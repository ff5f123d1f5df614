"""Creates the parts of a model in this process, and starts an engine with them.

The functions import the heavy libraries (torch, transformers) themselves. So other modules of the server can be
imported and tested without torch and transformers. This module does not handle requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bridle.config import ADAPTER_HOST_MEMORY, ADAPTER_MEMORY, EngineConfig, ModelConfig
from bridle.controller_tools import Desk
from bridle.engine.interfaces import Executor, Sampler
from bridle.engine.sampling.padded_vocab import NONE_UNNAMED
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.load_progress import Report, silent, watched
from bridle.lora import AdapterPool, find_device
from bridle.multimodal import ImageHosts, MediaReader, open_reader
from bridle.safe_repr import short_repr
from bridle.serving.controller_runtime import ControlSettings, demanded_pool, finish_control, guess_num_logits
from bridle.serving.models.early_parts import EarlyParts, begin_parts
from bridle.serving.models.kv_store import open_store
from bridle.serving.models.model_components import constraint_pool, tokenizer_folder
from bridle.serving.models.vocab_checks import check_sizes, find_unnamed
from bridle.serving.requests.sampling_defaults import read_defaults

if TYPE_CHECKING:
    from bridle.aici.client import PolicyPool, RuntimePool
    from bridle.control_vectors import ControlVectors
    from bridle.engine import AsyncEngine
    from bridle.engine.interfaces import ControllerPool, MediaDevice
    from bridle.model.pooling.settings import Pooling
    from bridle.structured_output import ConstraintPool
    from bridle.tokenizer import Tokenizer

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class LoadedExecutor(Executor, Protocol):
    """An executor with a loaded model, in this process or in another one. `num_bytes` is the memory in bytes that its
    weights and its KV cache take."""

    @property
    def num_bytes(self) -> int:
        raise NotImplementedError


#: A function that makes an executor from a configuration, a callback for progress, and a sampler of the caller's own.
ExecutorLoader = Callable[[ModelConfig, Report | None, Sampler | None], LoadedExecutor]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts from which an engine is made."""

    tokenizer: Tokenizer
    executor: LoadedExecutor
    runtime: RuntimePool | None
    demanded: PolicyPool | None
    defaults: Mapping[str, Any]
    pictures: MediaReader | None
    pooling: Pooling | None

    @property
    def control_vectors(self) -> ControlVectors | None:
        """Return the control vectors of the executor; None if the executor supports no control vectors."""
        return getattr(self.executor, "control_vectors", None)


def load_parts(
    config: ModelConfig,
    control: ControlSettings,
    progress: Report | None,
    sampler: Sampler | None,
    executors: ExecutorLoader | None,
    early: EarlyParts | None = None,
) -> Parts:
    """Load the tokenizer, the weights and the control runtime. `early` has the parts whose loading began before this
    call. If the tokenizer, the weights or the runtime fails to load, the parts that are loaded already are released."""
    report = progress or silent
    from bridle.backends import check_backend, load_executor

    with ExitStack() as undo:
        if early is None:
            check_backend(config)
            with watched(progress) if progress else nullcontext():
                early = begin_parts(config, control)
        undo.callback(early.abandon)
        path, pooling = early.path, early.pooling
        hosts = ImageHosts(config.image_hosts)
        report("reading the tokenizer", 0.0)
        tokenizer = early.get_tokenizer()
        num_ids = guess_num_logits(path)
        if num_ids is not None:
            check_sizes(tokenizer, num_ids, config.model)  # before the slow loading of the weights
        if config.draft_model is not None:
            _check_vocabulary(config.draft_model, tokenizer)
        report("importing libraries", 0.0)
        executor: LoadedExecutor = (executors or load_executor)(config, progress, sampler)
        undo.callback(executor.close)
        if num_ids is None:
            check_sizes(tokenizer, executor.info.vocab_size, config.model)
        load_vectors(executor, config.control_vectors)
        runtime = finish_control(control, early.control, executor.info.vocab_size)
        vocabulary, num_logits = tokenizer_folder(config, path), executor.info.vocab_size
        demanded = demanded_pool(control, vocabulary, num_logits) if pooling is None else None
        undo.pop_all()
    pictures = None if getattr(executor, "media", None) is None else open_reader(path, hosts=hosts)
    defaults = read_defaults(path, config.generation_config)
    return Parts(tokenizer, executor, runtime, demanded, defaults, pictures, pooling)


def _check_vocabulary(draft_model: str, tokenizer: Tokenizer) -> None:
    """Raise `InvalidRequest` for a draft model with another vocabulary, because all of its guesses would be wrong."""
    from bridle.tokenizer import Tokenizer

    different = tokenizer.first_difference(Tokenizer.load(draft_model))
    if different is not None:
        token, own, its = different
        raise InvalidRequest(
            f"draft model {draft_model!r} has another vocabulary: token {token} is {its!r} in the draft model and "
            f"{own!r} in the model; both need the same tokens",
            "draft_model",
        )


def load_vectors(holder: object, given: Sequence[str]) -> None:
    """Load control vectors, each as NAME=FILE, into the `control_vectors` of an executor or of replicas. Raises
    `InvalidRequest` for a vector that does not fit the model."""
    vectors: ControlVectors | None = getattr(holder, "control_vectors", None)
    for each in given:
        name, sign, source = each.partition("=")
        if not (name and sign and source):
            raise InvalidRequest(
                f"control_vectors: got {short_repr(each)}; must be NAME=FILE, such as polite=polite.gguf",
                "control_vectors",
            )
        if vectors is None:
            raise UnsupportedFeature(
                f"control_vectors: got {name}; this backend does not support control vectors. Serve the model with "
                "--backend torch.",
                "control_vectors",
            )
        vectors.add(name, source)


def make_adapters(executor: LoadedExecutor, config: EngineConfig) -> AdapterPool | None:
    """Return the pool that loads adapters into the executor; None if the executor supports no adapters."""
    device = find_device(executor)
    if device is None:
        return None
    return AdapterPool(
        device,
        item_size=_ITEM_SIZES[executor.info.dtype],
        device_memory=config.adapter_memory or ADAPTER_MEMORY,
        host_memory=config.adapter_host_memory or ADAPTER_HOST_MEMORY,
    )


def start_engine(
    parts: Parts, config: EngineConfig, pools: Sequence[ControllerPool], adapters: AdapterPool | None, tools: Desk
) -> tuple[AsyncEngine, ConstraintPool]:
    """Start the engine over the parts, on a thread, with all kinds of controllers that it can run."""
    from bridle.engine import AsyncEngine, Engine
    from bridle.engine.multimodal.encoder_cache import EncoderCache
    from bridle.tokenizer import Detokenizer

    info = parts.executor.info
    constraints = constraint_pool(parts.tokenizer, info)
    draft: Executor | None = getattr(parts.executor, "draft", None)
    device: MediaDevice | None = getattr(parts.executor, "media", None)
    media = None if device is None else EncoderCache(device)
    store = open_store(parts.executor, config)
    engine = Engine(
        parts.executor,
        config,
        pools=_all_pools(parts, constraints, pools, tools),
        decoder=Detokenizer(parts.tokenizer),
        adapters=adapters,
        draft=draft,
        media=media,
        store=store,
        vectors=parts.control_vectors,
        unnamed=NONE_UNNAMED if config.unnamed_ids else find_unnamed(parts.tokenizer, info),
    )
    client = AsyncEngine(engine)
    for mover in (media, adapters, store):
        if mover is not None:
            mover.on_change = client.wake
    for pool in (parts.runtime, parts.demanded):
        if pool is not None:
            pool.wake = client.wake
    tools.watch(client.wake)
    if parts.runtime is not None:
        parts.runtime.tools.desk = tools
    return client.start(), constraints


def _all_pools(
    parts: Parts, constraints: ConstraintPool, further: Sequence[ControllerPool], tools: Desk
) -> Sequence[ControllerPool]:
    """Return the pools for all kinds of controllers and for compositions of them."""
    from bridle.controllers import PythonControllerPool
    from bridle.controllers.beams import BeamPool
    from bridle.controllers.composite_pool import with_composed

    vocab_size = parts.executor.info.vocab_size
    pools = (
        PythonControllerPool(vocab_size, tools, partial(parts.tokenizer.encode, add_special_tokens=False)),
        BeamPool(),
        constraints,
        *further,
        *((parts.runtime,) if parts.runtime else ()),
        *((parts.demanded,) if parts.demanded else ()),
    )
    return with_composed(pools, vocab_size)
