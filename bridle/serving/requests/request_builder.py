"""Creates a checked `Request` from tokens.

All checks that depend on the model are made here, for every front end. For example, ids must be in the vocabulary, and
prompt and output must fit the context. `SamplingParams` has already checked what does not depend on a model.
`prompts.py` tokenizes the prompts of clients. This module uses no wire format.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from bridle.controllers.composition import parts_of
from bridle.controllers.reasoning_gate import ReasoningThenGrammar
from bridle.engine.input_processor import check_drawn, check_task
from bridle.engine.multimodal.multimodal_inputs import NO_SIGHTS, MultiModalInputs
from bridle.engine.request import RepeatMarks, Request, Retention
from bridle.errors import ContextOverflow, InvalidRequest
from bridle.sampling import SamplingParams
from bridle.sampling_values import LogitBias
from bridle.serving.policies.policy_registry import NO_POLICIES, Applied
from bridle.serving.requests.request_limits import DEFAULT_TERMS, RequestLimits
from bridle.serving.requests.token_healing import heal
from bridle.structured_output.spec import Constraint

if TYPE_CHECKING:
    from typing import Unpack

    from bridle.engine.request import StoppingCriteria
    from bridle.serving.models.loading import LoadedModel


class EventOptions(TypedDict, total=False):
    """Options for the events and the KV of a request. Events have text, unless `detokenize` is False. With `embeds`,
    the only event is the vector of the prompt. `tell_resuming` requests an event when the device is lost. `trace`
    requests the origin of each token. `sights` are the media of the request, with their positions. `parks` retains the
    KV of the request after its end. `continues` names the earlier request whose retained KV is used. `retains` are
    beginnings of the prompt whose KV is retained. Requests with the same `cache_key` go to the same replica. `repeats`
    marks parts of an output that must not be repeated."""

    detokenize: bool
    embeds: bool
    tell_resuming: bool
    sights: MultiModalInputs
    trace: bool
    parks: bool
    continues: str
    retains: tuple[Retention, ...]
    cache_key: str
    repeats: RepeatMarks | None


class OwnOptions(TypedDict, total=False):
    """Options of any request, apart from its prompt and sampling parameters. `adapter` is a name in `model.adapters`,
    or a name of the base model. `timeout` is in seconds from now. `tools` are the tools that controllers may call
    (None: all). `client_tools` are the tools whose calls the client answers. `policies` are the policies of the
    operator."""

    request_id: str | None
    adapter: str | None
    timeout: float | None
    tenant: str
    terms: RequestLimits
    metadata: Mapping[str, str] | None
    tools: tuple[str, ...] | None
    client_tools: tuple[str, ...]
    policies: Applied


class RequestOptions(OwnOptions, EventOptions, total=False):
    """All options of a request."""


#: Returns an id that is unique among requests.
new_request_id = partial(secrets.token_hex, 12)


def new_seed() -> int:
    """Return a seed for a request that sets none."""
    return secrets.randbits(53)  # every JSON reader keeps 53 bits exactly, so the client can send the seed back


def make_request(
    model: LoadedModel,
    tokens: tuple[int, ...],
    sampling: SamplingParams,
    controller: object | None = None,
    stopping: Sequence[StoppingCriteria] = (),
    **options: Unpack[RequestOptions],
) -> Request:
    """Create a request from checked tokens and sampling parameters, as `prompts.build_request` does."""
    embeds = options.get("embeds", False)
    if not embeds:
        check_task(model.info, embeds)
    policies = NO_POLICIES if embeds else options.get("policies", NO_POLICIES)
    if policies is not NO_POLICIES:
        sampling = policies.limit(sampling, model.max_sequence_tokens - len(tokens))
    check_fits(model, len(tokens), 0 if embeds else sampling.max_tokens)
    if sampling.seed is None:
        sampling = sampling.with_(seed=new_seed())
    if sampling.probes:
        sampling = sampling.with_(speculate=0)  # probes are read only at sampled positions
    if sampling.banned_phrases:
        _check_rolls_nothing_back(controller, "banned_phrases")
    if sampling.takes_text_back:
        _check_rolls_nothing_back(controller, "aligned" if sampling.aligned else "on_constraint_floor")
    if sampling.describe_constraint:
        message = "describe_constraint: got true for a prompt. Send messages, or write the form into the prompt."
        raise InvalidRequest(message, "describe_constraint")
    healing = None
    if sampling.token_healing:
        tokens, controller, healing = heal(model.tokenizer, model.info.vocab_size, tokens, controller)
    if policies is not NO_POLICIES:
        controller = policies.steer(controller)
    if sampling.keep_best and sampling.logprobs is None:
        raise InvalidRequest(
            "keep_best: it compares outputs by their logprobs, but logprobs is not set. Set logprobs to 0.", "keep_best"
        )
    if sampling.keep_best and _may_go_back(sampling, controller, policies):
        sampling = sampling.with_(keep_best=0)  # sums of log-probabilities may rise, so no output is lost early
    adapter, terms, tenant = options.get("adapter"), options.get("terms", DEFAULT_TERMS), options.get("tenant", "")
    # banned phrases and policies both need text
    needs_text = bool(sampling.banned_phrases) or policies.guard is not None
    sights = options.get("sights", NO_SIGHTS)
    if sights.media:
        sights = sights.of(tenant)
    return Request(
        id=options.get("request_id") or new_request_id(),
        prompt=tokens,
        sampling=sampling,
        controller=controller,
        guard=policies.guard,
        healing=healing,
        adapter=None if adapter is None else model.adapters.resolve(adapter),
        stopping=tuple(stopping),
        deadline=terms.end(options.get("timeout")),
        tenant=tenant,
        priority=terms.priority,
        detokenize=needs_text or options.get("detokenize", True),
        embeds=embeds,
        media=sights.media,
        runs=sights.runs,
        tell_resuming=options.get("tell_resuming", False),
        trace=options.get("trace", False),
        tools=options.get("tools"),
        client_tools=options.get("client_tools", ()),
        parks=options.get("parks", False),
        continues=options.get("continues", ""),
        retains=options.get("retains", ()),
        cache_key=options.get("cache_key", ""),
        repeats=options.get("repeats"),
        metadata=dict(options.get("metadata") or {}),
    )


def _may_go_back(sampling: SamplingParams, controller: object | None, policies: Applied) -> bool:
    """Return whether any part of the request may roll text back."""
    takes_back = sampling.takes_text_back or bool(sampling.banned_phrases) or policies.guard is not None
    return takes_back or not _are_constraints(controller)


def _are_constraints(controller: object | None) -> bool:
    return all(isinstance(part, (Constraint, ReasoningThenGrammar)) for part in parts_of(controller))


def _check_rolls_nothing_back(controller: object | None, field: str) -> None:
    """Raise `InvalidRequest` for a sampling field that rolls text back, if the controller may also do so."""
    if not _are_constraints(controller):
        message = f"{field}: this value takes text back, which a controller does by itself. Leave out one."
        raise InvalidRequest(message, field)


#: Sampling parameters of an embedding, which samples no token. The maximum length has no effect.
EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0)


def check_text(model: LoadedModel, text: str, param: str) -> None:
    """Raise `InvalidRequest` for a text that is not Unicode, or that is too long for the context, however it is
    tokenized."""
    check_length(model, len(text), param)
    check_unicode(text, param)


def check_length(model: LoadedModel, num_chars: int, param: str) -> None:
    """Raise `ContextOverflow` for texts of `num_chars` characters that cannot fit into the context, however they are
    tokenized."""
    limit = model.max_prompt_chars
    if num_chars > limit:
        raise ContextOverflow(
            f"{_context(model)}; {param} has {num_chars} characters, and at most {limit} characters can fit", param
        )


def check_unicode(text: str, param: str) -> None:
    """Raise `InvalidRequest` for a text that contains half of a surrogate pair. A text with half of a surrogate pair
    has no UTF-8 form, so no tokens spell it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequest(
            f"{param} is not valid Unicode: lone surrogate U+{code:04X} at character {error.start}",
            param,
        ) from None


def check_fits(model: LoadedModel, num_prompt: int, max_tokens: int | None) -> None:
    """Raise `ContextOverflow` for a prompt that leaves no room for `max_tokens` output tokens (None: for one token)."""
    most, limit = model.batching.max_input_tokens, model.max_sequence_tokens
    if num_prompt > most and most < limit:
        raise ContextOverflow(f"the prompt has {num_prompt} tokens; max_input_tokens is {most}", "prompt")
    total = num_prompt + (1 if max_tokens is None else max_tokens)
    if total <= limit:
        return
    wanted = "at least 1 new token" if max_tokens is None else f"max_tokens of {max_tokens}"
    advice = "send a shorter prompt" if num_prompt >= limit else f"max_tokens can be {limit - num_prompt} at most"
    raise ContextOverflow(
        f"{_context(model)}; the prompt has {num_prompt} tokens, and with {wanted} that is {total}: {advice}",
        "prompt" if num_prompt >= limit else "max_tokens",
    )


def check_num_tokens(model: LoadedModel, num_prompt: int) -> None:
    """Raise `ContextOverflow` if a prompt has more tokens than the model can hold."""
    limit = model.max_sequence_tokens
    if num_prompt > limit:
        raise ContextOverflow(f"{_context(model)}; the prompt has {num_prompt} tokens", "prompt")


def _context(model: LoadedModel) -> str:
    """Return the context length in the words of OpenAI's error message, by which clients recognize this error."""
    return f"This model's maximum context length is {model.max_sequence_tokens} tokens"


def check_sampling(model: LoadedModel, sampling: SamplingParams) -> None:
    """Raise `InvalidRequest` for tokens that the model does not have, and for stop strings that cannot occur in an
    output."""
    vocab_size, bias = model.info.vocab_size, sampling.logit_bias
    if bias:
        check_ids("logit_bias", (max(bias),) if isinstance(bias, LogitBias) else bias, model.info.num_drawable)
        check_drawn("logit_bias", bias, model.info)
    if sampling.stop_token_ids:
        check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    if sampling.allowed_token_ids:
        check_ids("allowed_token_ids", sampling.allowed_token_ids, model.info.num_drawable)
        check_drawn("allowed_token_ids", sampling.allowed_token_ids, model.info)
    for word in sampling.bad_words_ids:
        check_ids("bad_words_ids", word, vocab_size)
    for name in ("stop", "banned_phrases", "bad_words", "dry_sequence_breakers"):
        for text in getattr(sampling, name):
            check_unicode(text, name)
    if sampling.prediction:
        check_unicode(sampling.prediction, "prediction")
    for text, _ in sampling.bias_texts:
        check_unicode(text, "logit_bias")


def check_ids(param: str, tokens: Collection[int], vocab_size: int) -> None:
    """Raise `InvalidRequest` for ids outside of the vocabulary."""
    if tokens and set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequest(f"{param} holds {token!r}; token ids are integers", param)
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{param} holds token {token}; ids go from 0 to {vocab_size - 1}", param)
