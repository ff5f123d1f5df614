"""Converts texts, ids and images of a client to the tokens of a prompt, and to a request.

A text that is too long is refused before it is tokenized. A long text is tokenized in a thread. This module uses no
wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bridle.controllers.composition import compose
from bridle.engine.multimodal.multimodal_inputs import MultiModalInputs
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.multimodal import Source, reads
from bridle.multimodal.modalities import WORDS
from bridle.sampling import SamplingParams
from bridle.serving.requests import request_builder
from bridle.serving.requests.text_params import resolve_text_params
from bridle.structured_output.spec import Constraint
from bridle.structured_output.spec import parse as parse_constraint

if TYPE_CHECKING:
    from typing import Unpack

    from bridle.engine.request import StoppingCriteria
    from bridle.serving.models.loading import LoadedModel

_Part = TypeVar("_Part")

#: Texts up to this length are tokenized at once on the event loop, longer ones in a thread.
MAX_INLINE_CHARS = 4_096
#: Number of characters that a thread tokenizes in one go, because other requests wait for the thread.
_GROUP_CHARS = 65_536


def build_request(
    model: LoadedModel,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    *,
    controller: object | None = None,
    constraint: Constraint | Mapping[str, Any] | None = None,
    stopping: Sequence[StoppingCriteria] = (),
    add_special_tokens: bool = True,
    pictures: Sequence[Source] = (),
    **options: Unpack[request_builder.RequestOptions],
) -> Request:
    """Create a request that `model` can run. The request always has a seed, so that it can be repeated.

    `constraint` restricts the output. The constraint is an object or plain data, and can be combined with a controller.
    The `pictures` belong to the placeholders of the prompt, in order. Raises `InvalidRequest` (or its subclass
    `UnknownAdapter`) or `ContextOverflow`. The error message names the field, the value and the limit.
    """
    tokens = encode_prompt(model, prompt, add_special_tokens)
    if pictures:
        tokens, options["sights"] = process_multimodal(model, tokens, pictures)
    request_builder.check_sampling(model, sampling)
    sampling = resolve_text_params(model, sampling)
    steering = compose(controller, None if constraint is None else parse_constraint(constraint))
    return request_builder.make_request(model, tokens, sampling, steering, stopping, **options)


def process_multimodal(
    model: LoadedModel, tokens: tuple[int, ...], sources: Sequence[Source]
) -> tuple[tuple[int, ...], MultiModalInputs]:
    """Return the tokens of a prompt with its images and sounds at their positions. This is slow. Raises
    `InvalidRequest` or `UnsupportedFeature` for media that are invalid or that the model does not read."""
    for source in sources:
        if source.modality not in model.modalities:
            said, what = reads(model.name, model.modalities), WORDS[source.modality][1]
            raise UnsupportedFeature(f"{said}; no {what} can be sent to it", source.where)
    assert model.pictures is not None  # otherwise the model has no modalities
    return model.pictures.place(tokens, model.pictures.read_all(sources), model.tokenizer)


async def process_multimodal_async(
    model: LoadedModel, tokens: tuple[int, ...], sources: Sequence[Source]
) -> tuple[tuple[int, ...], MultiModalInputs]:
    """Run `process_multimodal` in a thread, for callers in an event loop."""
    is_fetched = any(source.is_remote for source in sources)
    in_thread = model.in_fetching_thread if is_fetched else model.in_text_thread
    return await in_thread(process_multimodal, model, tokens, sources)


async def tokenize(model: LoadedModel, prompt: str | Sequence[int], add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the tokens of a prompt as `encode_prompt` does, for callers in an event loop. A long text is tokenized in
    a thread."""
    if isinstance(prompt, str) and len(prompt) > MAX_INLINE_CHARS:
        return await model.in_text_thread(encode_prompt, model, prompt, add_special_tokens)
    return encode_prompt(model, prompt, add_special_tokens)


async def tokenize_all(
    model: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    truncate: int | None = None,
    add_special_tokens: bool = True,
) -> list[tuple[int, ...]]:
    """Tokenize all prompts of a call. Long prompts are tokenized in a thread. A prompt that is too long for any context
    is refused before any prompt is tokenized, unless it will be truncated."""
    for prompt in prompts if truncate is None else ():
        if isinstance(prompt, str):
            request_builder.check_length(model, len(prompt), "prompt")
    if sum(map(len, prompts)) <= MAX_INLINE_CHARS:
        return _encode_all(model, prompts, truncate, add_special_tokens)
    found: list[tuple[int, ...]] = []
    for group in grouped(prompts, len):
        found += await model.in_text_thread(_encode_all, model, group, truncate, add_special_tokens)
    return found


def _encode_all(
    model: LoadedModel, prompts: Sequence[str | Sequence[int]], truncate: int | None, add_special_tokens: bool
) -> list[tuple[int, ...]]:
    return [encode_prompt(model, prompt, add_special_tokens, truncate) for prompt in prompts]


def grouped(parts: Sequence[_Part], num_chars: Callable[[_Part], int]) -> Iterator[list[_Part]]:
    """Yield groups of adjacent parts of a prompt. A group has at most `_GROUP_CHARS` characters, or it is a single
    longer part."""
    group: list[_Part] = []
    size = 0
    for part in parts:
        if group and size + num_chars(part) > _GROUP_CHARS:
            yield group
            group, size = [], 0
        group.append(part)
        size += num_chars(part)
    yield group


def encode_prompt(
    model: LoadedModel, prompt: str | Sequence[int], add_special_tokens: bool = True, truncate: int | None = None
) -> tuple[int, ...]:
    """Return the checked tokens of a prompt. With `truncate`, only the last `truncate` tokens of the prompt are
    returned. An empty text stands for the token that begins a document, if the model has such a token."""
    if isinstance(prompt, str):
        tokens = tuple(model.tokenizer.encode(_readable(model, prompt, truncate), add_special_tokens))
        if not tokens and model.tokenizer.bos_token_id is not None:
            tokens = (model.tokenizer.bos_token_id,)
    else:
        if truncate is None:
            request_builder.check_num_tokens(model, len(prompt))
        tokens = tuple(prompt)
        request_builder.check_ids("prompt", tokens, model.info.vocab_size)
    if not tokens:
        raise InvalidRequest("the prompt is empty; it must have at least one token", "prompt")
    if truncate is not None:
        tokens = tokens[-truncate:]
    request_builder.check_num_tokens(model, len(tokens))
    return tokens


def _readable(model: LoadedModel, text: str, truncate: int | None) -> str:
    """Return the part of a text that must be tokenized: the whole text, or the end that contains the last `truncate`
    tokens."""
    if truncate is None:
        request_builder.check_text(model, text, "prompt")
        return text
    request_builder.check_unicode(text, "prompt")
    return text[-model.max_prompt_chars :]
