"""Routes for tokenization and detokenization, in the formats of three servers: text-generation-inference, vLLM and
llama.cpp. The field with the text decides the format: `inputs`, `prompt` or `messages`, or `content`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, WithJsonSchema
from starlette.responses import Response

from bridle.chat.conversation import Conversation, prompt_text
from bridle.errors import InvalidRequest
from bridle.http.chunked_json import ChunkedJsonResponse
from bridle.http.fields import InnerFields
from bridle.http.openai.schemas import MAX_MESSAGES, ChatBody, JsonObjects, objects
from bridle.http.state import borrow, json_response
from bridle.http.tgi.errors import TgiRoute
from bridle.http.tgi.schemas import ModelName, base_name
from bridle.serving import LoadedModel, check_text
from bridle.serving.requests.request_builder import check_num_tokens
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.content_tokens import encode_prompt, encode_with_offsets, without_marks

_ROWS_PER_PIECE = 4_096

router = APIRouter(route_class=TgiRoute)


def _ids(value: Any) -> Any:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("tokens must be a list of integers")
    return value


Ids = Annotated[list[int], BeforeValidator(_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


class TokenizeBody(InnerFields):
    """Body of `POST /tokenize`: one of `inputs`, `prompt`, `messages` and `content`."""

    inputs: str | None = None
    prompt: str | None = None
    messages: Annotated[JsonObjects | None, objects("messages", MAX_MESSAGES)] = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None
    model: ModelName = None


class DetokenizeBody(InnerFields):
    """Body of `POST /detokenize`."""

    tokens: Ids
    model: ModelName = None


@router.post("/tokenize", summary="The tokens of a text, in the format of the API that the request's field belongs to")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    given = [name for name in ("inputs", "prompt", "messages", "content") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"{' and '.join(given) or 'no text'} given; send one of inputs, prompt, messages, content")
    (name,) = given
    model = await borrow(request, body.model)
    if name == "inputs":
        return ChunkedJsonResponse(await _told(model, body.inputs or "", body.add_special_tokens is not False, _rows))
    if name == "content":
        shape = _pieces if body.with_pieces else _plain
        return ChunkedJsonResponse(await _told(model, body.content or "", bool(body.add_special), shape), "tokens", {})
    if body.messages is not None:
        tokens = await model.in_text_thread(_tokens_of_chat, model, body.messages, bool(body.add_special_tokens))
    else:
        _check(model, body.prompt or "", name)
        adds_special = body.add_special_tokens is not False
        tokens = await model.in_text_thread(model.tokenizer.encode, body.prompt or "", adds_special)
    texts = [model.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    shown = {"count": len(tokens), "max_model_len": model.max_sequence_tokens, "tokens": tokens, "token_strs": texts}
    return json_response(shown)


@router.post("/detokenize", summary="The text of tokens (vLLM's `prompt` and llama.cpp's `content`)")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    model = await borrow(request, body.model)
    check_num_tokens(model, len(body.tokens))
    wrong = next((token for token in body.tokens if not 0 <= token < model.info.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"tokens has the id {wrong}; token ids go from 0 to {model.info.vocab_size - 1}", "tokens")
    text = await model.in_text_thread(model.tokenizer.decode, body.tokens, False)
    return json_response({"prompt": text, "content": text})


@router.post("/chat_tokenize", summary="The prompt of a conversation, and its tokens")
async def chat_tokenize(body: ChatBody, request: Request) -> Response:
    model = await borrow(request, base_name(body.model))
    text = await model.in_text_thread(prompt_text, model, body.conversation())
    _check(model, text, "messages")
    tokens = await model.in_text_thread(_chat_rows, model.tokenizer, text)
    return ChunkedJsonResponse(tokens, "tokenize_response", {"templated_text": without_marks(text)})


def _chat_rows(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return _in_pieces(tokenizer, encode_with_offsets(tokenizer, text), without_marks(text), _rows)


def _tokens_of_chat(model: LoadedModel, messages: list[Any], adds_special: bool) -> list[int]:
    text = prompt_text(model, Conversation(messages))
    _check(model, text, "messages")
    return encode_prompt(model.tokenizer, text, adds_special)


def _check(model: LoadedModel, text: str, name: str) -> None:
    if not text:
        raise InvalidRequest(f"{name} is empty; it must have at least one character", name)
    check_text(model, text, name)


_Rows = Callable[[Tokenizer, list[tuple[int, int, int]], str], list[Any]]


async def _told(model: LoadedModel, text: str, adds_special: bool, shape: _Rows) -> list[bytes]:
    """Tokenize a text. Returns the tokens as JSON, in pieces of some thousands of tokens."""
    _check(model, text, "inputs")
    return await model.in_text_thread(_encoded, model.tokenizer, text, adds_special, shape)


def _encoded(tokenizer: Tokenizer, text: str, adds_special: bool, shape: _Rows) -> list[bytes]:
    return _in_pieces(tokenizer, tokenizer.encode_with_offsets(text, adds_special), text, shape)


def _in_pieces(tokenizer: Tokenizer, rows: list[tuple[int, int, int]], text: str, shape: _Rows) -> list[bytes]:
    """Encode tokens as JSON in pieces, so that other tasks can run between the pieces of a very long list."""
    pieces = (shape(tokenizer, rows[at : at + _ROWS_PER_PIECE], text) for at in range(0, len(rows), _ROWS_PER_PIECE))
    return [msgspec.json.encode(piece)[1:-1] for piece in pieces]


def _rows(tokenizer: Tokenizer, rows: list[tuple[int, int, int]], text: str) -> list[Any]:
    return [
        {"id": token, "text": text[start:stop] or tokenizer.token_text(token), "start": start, "stop": stop}
        for token, start, stop in rows
    ]


def _plain(tokenizer: Tokenizer, rows: list[tuple[int, int, int]], text: str) -> list[Any]:
    return [token for token, _, _ in rows]


def _pieces(tokenizer: Tokenizer, rows: list[tuple[int, int, int]], text: str) -> list[Any]:
    """Return tokens in llama.cpp's format, in which a token that is not valid UTF-8 is a list of bytes."""
    found: list[Any] = []
    for token, _, _ in rows:
        data = tokenizer.token_bytes(token)
        try:
            found.append({"id": token, "piece": data.decode("utf-8")})
        except UnicodeDecodeError:
            found.append({"id": token, "piece": list(data)})
    return found
