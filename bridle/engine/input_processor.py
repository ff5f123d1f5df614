"""Creates the first sequence of a request. This module refuses requests that can never be served, and starts to create
controllers.

`InputProcessor` knows the limits of the model, but no state that changes while the engine runs. `ControllerOpenings`
has the sequences whose controllers are being created. A sequence whose controller is being created has no KV blocks and
is not queued. If the sequence ends meanwhile, its controller is dropped as soon as it exists. If the sequence does not
end, it begins when its controller exists. The sequence must wait because the controller may rewrite the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from bridle.config import EngineConfig
from bridle.engine.control.controller_manager import ControllerManager, as_controller_error
from bridle.engine.control.decision import both_masks, mask_of
from bridle.engine.interfaces import Ask, ExecutorInfo
from bridle.engine.multimodal.multimodal_inputs import check_media
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.request import Request
from bridle.engine.scheduling.batching import Batching
from bridle.engine.sequence import Sequence, root_key
from bridle.engine.sequence_state import QueueState
from bridle.errors import ContextOverflow, ControllerError, InternalError, InvalidRequest, UnsupportedFeature

_Prompt = Future[tuple[int, ...]]

#: Number of samples and splices that any controlled output may make in addition to those allowed by its length.
_SPARE_MOVES = 256


class InputProcessor:
    """Checks requests against the model's limits and creates their first sequences."""

    def __init__(self, info: ExecutorInfo, config: EngineConfig) -> None:
        self._info = info
        self._config = config
        self._max_input_tokens = Batching.of(config, info).max_input_tokens

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest`, `ContextOverflow` or `UnsupportedFeature` if the model can never serve the
        request."""
        sampling, vocab_size = request.sampling, self._info.vocab_size
        if request.embeds or self._info.task != "generate":
            check_task(self._info, request.embeds)
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed", "prompt")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"prompt holds token {wrong}; the vocabulary has {vocab_size} tokens", "prompt")
        if sampling.logit_bias:
            self._check_named("logit_bias", sampling.logit_bias)
        if sampling.allowed_token_ids:
            self._check_named("allowed_token_ids", sampling.allowed_token_ids)
        if sampling.n > self._config.max_forks:
            raise InvalidRequest(f"n is {sampling.n}; at most {self._config.max_forks}", "n")
        if request.runs or request.media:
            check_media(request.media, request.runs, len(request.prompt))
        max_len = self.max_len(request, len(request.prompt))
        if request.generated:
            self._check_generated(request, max_len)

    def _check_named(self, field: str, tokens: Collection[int]) -> None:
        """Raise `InvalidRequest` if a field of the request names a token id that is never sampled."""
        if max(tokens) >= self._info.num_drawable:
            raise InvalidRequest(
                f"{field} names token {max(tokens)}; the vocabulary has {self._info.num_drawable} tokens", field
            )
        check_drawn(field, tokens, self._info)

    def _check_generated(self, request: Request, max_len: int) -> None:
        if not request.is_plain:
            raise InvalidRequest(
                "generated: only a request with one output, no controller and no mirostat can continue from tokens",
                "generated",
            )
        num_tokens = len(request.prompt) + len(request.generated)
        if num_tokens >= max_len:
            raise InvalidRequest(
                f"generated: prompt and generated tokens are {num_tokens} tokens already; the output ends at {max_len}",
                "generated",
            )
        if min(request.generated) < 0 or max(request.generated) >= self._info.vocab_size:
            raise InvalidRequest("generated has tokens outside the vocabulary", "generated")

    def max_len(self, request: Request, num_prompt: int) -> int:
        """Return the length in tokens at which an output ends, for a prompt of `num_prompt` tokens. Raises
        `ContextOverflow`. A request for an embedding needs no room for output."""
        max_tokens = 0 if request.embeds else request.sampling.max_tokens
        capacity = self._info.num_blocks * self._info.block_size
        limit = min(self._info.max_model_len, capacity)
        wanted = num_prompt + (1 if max_tokens is None else max_tokens)
        if wanted > limit:
            what = "the model's context" if limit == self._info.max_model_len else "the KV cache"
            more = "" if max_tokens is None or request.embeds else f" and max_tokens is {max_tokens}"
            raise ContextOverflow(
                f"the prompt has {num_prompt} tokens{more}; at most {limit} tokens fit into {what}", "prompt"
            )
        if num_prompt > self._max_input_tokens:
            raise ContextOverflow(
                f"the prompt has {num_prompt} tokens; max_input_tokens is {self._max_input_tokens}", "prompt"
            )
        return limit if max_tokens is None else wanted

    def new_sequence(self, request: Request, seq_id: int) -> Sequence:
        """Return the first sequence of a checked request."""
        sampling = request.sampling
        eos = () if sampling.ignore_eos else self._info.eos_token_ids
        seq = Sequence(
            id=seq_id,
            request=request,
            index=0,
            tokens=[],
            num_prompt=0,
            sampling=sampling,
            max_len=0,
            key=root_key(sampling.seed or 0),
            queue=QueueState(request.priority),
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            runs=request.runs,
        )
        if sampling.allowed_token_ids:
            seq.allowed = mask_of(sampling.allowed_token_ids, self._info.vocab_size)
        if request.guard is not None and request.guard.allowed is not None:
            seq.allowed = both_masks(seq.allowed, request.guard.allowed)
        seq.set_prompt(request.prompt, self.max_len(request, len(request.prompt)))
        return seq

    def replace_prompt(self, seq: Sequence, prompt: tuple[int, ...]) -> None:
        """Set the prompt of the sequence to the prompt that its controller returned. Raises `ControllerError` or
        `ContextOverflow`."""
        if not prompt or min(prompt) < 0 or max(prompt) >= self._info.vocab_size:
            raise ControllerError("the controller returned a prompt that is empty or has tokens outside the vocabulary")
        if seq.runs:
            raise ControllerError("the controller returned another prompt, but a prompt with images cannot be replaced")
        seq.set_prompt(prompt, self.max_len(seq.request, len(prompt)))

    def max_moves(self, seq: Sequence) -> int:
        """Return the maximum number of samples and splices of an output with a controller."""
        return self._config.max_draws_factor * (seq.max_len - seq.num_prompt) + _SPARE_MOVES


def check_task(info: ExecutorInfo, embeds: bool) -> None:
    """Raise `UnsupportedFeature` if the request wants vectors or text that the model cannot give."""
    if embeds and not info.embedding_size:
        raise UnsupportedFeature("this server computes no embeddings with this model", "model")
    if not embeds and info.task != "generate":
        what = "computes embeddings: ask /v1/embeddings, /v1/score or /v1/rerank, or LLM.embed"
        if info.task == "classify":
            what = "classifies texts: ask /v1/classify, or /v1/score and /v1/rerank if there is one label"
        raise UnsupportedFeature(f"this model generates no text; it {what}", "model")


def check_drawn(field: str, tokens: Iterable[int], info: ExecutorInfo) -> None:
    """Raise `InvalidRequest` if a field contains an id that has no token and so is never sampled."""
    wrong = info.unnamed.among(tokens)
    if wrong:
        raise InvalidRequest(
            f"{field} holds {min(wrong)}, an id that stands for no token and is never sampled. Remove it", field
        )


@dataclass(eq=False, repr=False)
class ControllerOpenings:
    """Creates controllers. `begin` is called with each sequence whose prompt is final."""

    _intake: InputProcessor
    _steering: ControllerManager
    _progress: OutputProcessor
    _begin: Callable[[Sequence], None]
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.waiting: dict[int, tuple[Sequence, _Prompt]] = {}

    @property
    def is_any_ready(self) -> bool:
        """Return True if `begin_ready` would begin a sequence now."""
        return any(future.done() for _, future in self.waiting.values())

    def open(self, seq: Sequence) -> None:
        """Start creating the controller of `seq`."""
        seq.control.pool = self._steering.pool_for(seq.request.controller)
        if seq.control.pool is None:
            raise InternalError("no controller pool runs this controller; the request should have been refused earlier")
        seq.control.opened_at = self._clock()
        self.waiting[seq.id] = seq, seq.control.pool.open(seq.request)

    def begin_ready(self) -> None:
        """Begin the sequences whose controllers are ready, with their rewritten prompts."""
        for seq, future in list(self.waiting.values()):
            if seq.is_finished:
                del self.waiting[seq.id]
                _abandon(seq, future)
            elif future.done():
                del self.waiting[seq.id]
                self._begin_controlled(seq, future)

    def _begin_controlled(self, seq: Sequence, future: _Prompt) -> None:
        try:
            prompt = tuple(future.result())
            seq.control.opening_seconds = self._clock() - (seq.control.opened_at or 0.0)
            if prompt != seq.request.prompt:
                self._intake.replace_prompt(seq, prompt)
            seq.control.max_moves = self._intake.max_moves(seq)
        except Exception as error:
            self._progress.fail_by_controller(seq, as_controller_error(error))
            _abandon(seq, future)
            return
        if seq.trace is not None:
            self._progress.tracer.opened(seq)
        self._steering.add(seq, Ask(seq.id, request=seq.request))
        self._begin(seq)
        self._steering.ask()


def _abandon(seq: Sequence, future: _Prompt) -> None:
    """Drop the controller of a request that ended before the controller was asked. The creation of the controller may
    still be in progress."""
    pool, request = seq.control.pool, seq.request

    def let_go(opened: _Prompt) -> None:
        if pool is not None and not opened.cancelled() and opened.exception() is None:
            pool.abandon(request)

    if not future.cancel():
        future.add_done_callback(let_go)
