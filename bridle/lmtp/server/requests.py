"""Builds engine requests from GENERATE and SCORE messages: adds defaults, looks up names, and limits values.

Excessive values of LMQL are reduced or ignored, such as 128 tokens at the end of the context, or biases for ids beyond
the vocabulary. All other invalid values are refused; the error names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bridle.compat.request_fields import BY_NAME
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.multimodal.multimodal_inputs import NO_SIGHTS, MultiModalInputs
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.lmtp.messages import DEFAULT_MAX_TOKENS, Generate, Prompt, Score
from bridle.multimodal import Source
from bridle.sampling import MAX_LOGPROBS, SamplingParams, fields_on
from bridle.serving import LoadedModel, new_seed
from bridle.serving.lifecycle.generation import Generation
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.requests.prompts import process_multimodal_async
from bridle.serving.requests.sampling_defaults import filled
from bridle.serving.requests.steering import ignores_eos

#: The JSON types that a field of GENERATE accepts, by the type of the sampling parameter.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "tuple[str, ...]": (str, list),
    "tuple[int, ...]": (list,),
    "Watermark": (bool, dict),
    "Mapping[str, float]": (dict,),
}


def options_of(params: type[SamplingParams]) -> Mapping[str, tuple[type, ...]]:
    """Return the fields of GENERATE that are sampling parameters, with their types."""
    own = {each.name for each in fields(Generate)}
    return {
        each.name: _KINDS[str(each.type).removesuffix(" | None")]
        for each in fields(params)
        if each.name in fields_on("lmtp", params) and each.name not in own
    }


OPTIONS = options_of(SamplingParams)
#: Fields for beam search only. LMQL does beam search itself, but still sends them.
_IGNORED = ("length_penalty",)
#: The maximum number of logit biases of a request that is built without a thread.
_MAX_INLINE_BIASES = 4_096


async def generation_of(serving: RequestLifecycle, asked: Generate, prefix: tuple[int, ...]) -> Generation:
    """Prepare the generation of a GENERATE request. `prefix` has the tokens of the request's buffer, and `serving` has
    its model."""
    model = serving.model
    context = await context_of(serving, asked.prompt, prefix) or (_first_token(model),)
    context, sights = await _seen(model, asked, context)
    steering = serving.steering(asked, asked.constraint, asked.rewind)
    most = _limit(serving, asked, len(context))
    if len(asked.logit_bias) > _MAX_INLINE_BIASES:
        sampling = await model.in_text_thread(_sampling, model, asked, most)
    else:
        sampling = _sampling(model, asked, most)
    has_text = wants_text(asked) or bool(sampling.stop)
    return await serving.prepare([context], sampling, steering, detokenize=has_text, sights=sights)


async def _seen(
    model: LoadedModel, asked: Generate, context: tuple[int, ...]
) -> tuple[tuple[int, ...], MultiModalInputs]:
    """Return the context's tokens, and the images, audio and videos for its placeholders."""
    if not (asked.images or asked.audio or asked.video):
        return context, NO_SIGHTS
    if asked.save is not None:
        what = "images" if asked.images else "audio" if asked.audio else "video"
        raise UnsupportedFeature(
            f"a buffer stores only tokens: a stream with {what} cannot be saved as a buffer", "save"
        )
    given = ("images", "image", asked.images), ("audio", "audio", asked.audio), ("video", "video", asked.video)
    sources = [source for field, modality, urls in given for source in _sources(urls, field, modality)]
    return await process_multimodal_async(model, context, sources)


def _sources(urls: Sequence[Any], field: str, modality: str) -> list[Source]:
    for number, url in enumerate(urls):
        if not isinstance(url, str):
            raise InvalidRequest(f"{field}[{number}] is a {type(url).__name__}; must be a URL, as a text", field)
    return [Source(url, f"{field}[{number}]", modality=modality) for number, url in enumerate(urls)]


async def scoring_of(serving: RequestLifecycle, asked: Score, prefix: tuple[int, ...]) -> tuple[Generation, int]:
    """Prepare a SCORE request. Returns the generation, and the number of tokens to score at the end of its prompt."""
    if not asked.scored:
        raise InvalidRequest("'scored' is empty; it must hold at least one token", "scored")
    context = await context_of(serving, asked.prompt, prefix)
    (scored,) = await serving.tokens([asked.scored], add_special_tokens=False)
    sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=len(context))
    return await serving.prepare([(*context, *scored)], sampling, detokenize=False), len(scored)


async def context_of(serving: RequestLifecycle, prompt: Prompt, prefix: tuple[int, ...]) -> tuple[int, ...]:
    """Return prefix and prompt as tokens. Special tokens that begin a text are added only at the beginning of a
    context."""
    if not prompt:
        return prefix
    (tokens,) = await serving.tokens([prompt], add_special_tokens=not prefix)
    return prefix + tokens


def wants_text(asked: Generate) -> bool:
    """Return whether answers contain text, which is the default if the prompt is text."""
    return isinstance(asked.prompt, str) if asked.text is None else asked.text


def _first_token(model: LoadedModel) -> int:
    """Return the token with which an empty context begins. Raises `InvalidRequest` if the model has no such token."""
    bos = model.tokenizer.bos_token_id
    if bos is not None:
        return bos
    if model.info.eos_token_ids:
        return model.info.eos_token_ids[0]
    raise InvalidRequest(
        "'prompt' is empty, and the model has no BOS or EOS token to begin with; send a token", "prompt"
    )


def _limit(serving: RequestLifecycle, asked: Generate, num_context: int) -> int | None:
    """Return the maximum number of output tokens that fits into the context; None if only the operator's limit
    applies."""
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {asked.max_tokens}; must be at least 1", "max_tokens")
    most = serving.limit(DEFAULT_MAX_TOKENS) if asked.max_tokens is None else asked.max_tokens
    room = max(serving.model.max_sequence_tokens - num_context, 1)
    return None if most is None else min(most, room)


def _sampling(model: LoadedModel, asked: Generate, max_tokens: int | None) -> SamplingParams:
    vocab_size = model.info.vocab_size
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=max(asked.temperature or 0.0, 0.0),
        logit_bias=_bias(asked.logit_bias, model.info),
        logprobs=min(max(asked.top_logprobs, 1), MAX_LOGPROBS, vocab_size),
        logprobs_mode="processed",
        **_options(asked),
    )
    said = {"max_tokens", *asked.options, *(() if asked.temperature is None else ("temperature",))}
    return filled(sampling, model.defaults, said)


def _options(asked: Generate) -> dict[str, Any]:
    """Return the sampling parameters in `options`. Raises `InvalidRequest` for unknown fields."""
    given = asked.options
    for name, value in given.items():
        kinds = (int, float) if name in _IGNORED else OPTIONS.get(name)
        if kinds is None:
            row = BY_NAME.get(name)
            why = f": {row.why}" if row is not None and row.why else ""
            raise InvalidRequest(f"{name[:100]!r} is not a field of a GENERATE message{why}", name[:100])
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidRequest(f"{name} is a {type(value).__name__}; must be {expected}", name)
    options = {name: value for name, value in given.items() if name not in _IGNORED}
    # The seed is set here, because setting it later would validate all biases again.
    return {"seed": new_seed()} | options | {"ignore_eos": ignores_eos(asked, options.get("ignore_eos"))}


def _bias(bias: Mapping[int, float], info: ExecutorInfo) -> Mapping[int, float]:
    """Return the biases without ids that cannot be sampled. LMQL uses ids beyond the tokenizer's vocabulary for its own
    tags."""
    num_drawable, unnamed = info.num_drawable, info.unnamed.among(bias)
    if not bias or (min(bias) >= 0 and max(bias) < num_drawable and not unnamed):
        return bias
    return {t: value for t, value in bias.items() if 0 <= t < num_drawable and t not in unnamed}
