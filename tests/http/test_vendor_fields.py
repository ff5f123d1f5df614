"""Fields that OpenAI's and Anthropic's real clients may send: each is taken where they send it, or has a row that
says what becomes of it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from bridle.compat.request_fields import BY_NAME
from bridle.compat.schema import System
from bridle.http.anthropic.schemas import MessagesBody, OutputFields, ThinkingFields
from bridle.http.fields import Fields
from bridle.http.openai.embeddings import EmbeddingsBody
from bridle.http.openai.responses.schemas import ResponsesBody, TextFields
from bridle.http.openai.schemas import ChatBody, CompletionBody, ReasoningFields, StreamOptions
from dev.coming_from import listed, names


def of_openai() -> tuple[str, dict[type[Fields], tuple[Any, ...]]]:
    import openai
    from openai.types import CompletionCreateParams, EmbeddingCreateParams, chat, responses, shared_params

    return openai.__version__, {
        CompletionBody: (CompletionCreateParams,),
        ChatBody: (chat.CompletionCreateParams,),
        ResponsesBody: (responses.ResponseCreateParams,),
        EmbeddingsBody: (EmbeddingCreateParams,),
        StreamOptions: (chat.ChatCompletionStreamOptionsParam, responses.response_create_params.StreamOptions),
        TextFields: (responses.ResponseTextConfigParam,),
        ReasoningFields: (shared_params.Reasoning,),
    }


def of_anthropic() -> tuple[str, dict[type[Fields], tuple[Any, ...]]]:
    import anthropic
    from anthropic.types import MessageCreateParams, beta
    from anthropic.types.beta.message_create_params import MessageCreateParams as BetaParams

    return anthropic.__version__, {
        MessagesBody: (MessageCreateParams, BetaParams),
        OutputFields: (beta.BetaOutputConfigParam,),
        ThinkingFields: (beta.BetaThinkingConfigParam,),
    }


VENDORS = {"OpenAI": of_openai, "Anthropic": of_anthropic}


def fields_of(body: type[Fields], params: tuple[Any, ...]) -> set[str]:
    """The names of the client's parameters, with that of the object that they are within."""
    kinds = [kind for each in params for kind in get_args(each) or (each,)]
    found = {name for kind in kinds for name in kind.__required_keys__ | kind.__optional_keys__}
    return {f"{body.within}.{name}" if body.within else name for name in found}


@pytest.mark.parametrize("system", VENDORS)
def test_the_list_has_the_fields_of_the_client(system: System) -> None:
    """A newer client than the listed one may have more; then the list has to be made anew."""
    version, bodies = VENDORS[system]()
    kept = listed(system)
    client = f"{system}'s client {version}, of which {kept['version'].split()[-1]} is listed"
    found = set().union(*(fields_of(body, params) for body, params in bodies.items()))
    assert not found - set(names(kept, "fields")), client
    if kept["version"].endswith(f" {version}"):
        assert found == set(names(kept, "fields")), client


@pytest.mark.parametrize("system", VENDORS)
def test_a_field_is_taken_or_told_of_where_the_client_sends_it(system: System) -> None:
    """What is the same on some routes alone says so, and is refused on the others."""
    version, bodies = VENDORS[system]()
    for body, params in bodies.items():
        for name in fields_of(body, params) - {f"{body.within}.{own}".lstrip(".") for own in body.model_fields}:
            row = BY_NAME.get(name)
            assert row is not None and row.why and row.here != name, (version, body.__name__, name)
