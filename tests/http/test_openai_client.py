"""Tests that the official OpenAI client works unchanged with a running server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.http.conftest import REPLY
from tests.http.harness import NAME, saying, scripted_model, served, tokenizer

HI = [{"role": "user", "content": "Hi"}]
NUM_TOKENS = len(tokenizer().encode(REPLY)) + 1  # and the one that ends it


def test_the_official_client_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="Say", max_tokens=100)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (REPLY, "stop")
    assert answer.model == NAME
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, NUM_TOKENS)
    assert answer.usage.total_tokens == 3 + NUM_TOKENS


def test_completion_defaults_to_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="Say")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_streamed_completion_says_the_same(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=NAME, prompt="Say", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == REPLY
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HI)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert choice.logprobs is None
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("content", [REPLY, [{"type": "text", "text": REPLY[:4]}, {"type": "text", "text": REPLY[4:]}]])
@pytest.mark.usefixtures("obeyed_drafts")
def test_a_right_prediction_is_accepted(client: openai.OpenAI, content: Any) -> None:
    """With OpenAI's predicted outputs, the answer is the same, and the usage counts the accepted prediction tokens."""
    answer = client.chat.completions.create(
        model=NAME, messages=HI, prediction={"type": "content", "content": content}, extra_body={"speculate": 4}
    )
    assert answer.choices[0].message.content == REPLY
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert answer.usage.completion_tokens == NUM_TOKENS
    # The text is drafted as it was tokenized alone; where that differs the draft is looked up again, or wrong.
    assert (details.accepted_prediction_tokens or 0) > 0


def test_a_prediction_without_text_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction"):
        client.chat.completions.create(model=NAME, messages=HI, extra_body={"prediction": {"type": "content"}})


def test_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=NAME, messages=HI, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert "".join(delta.content or "" for delta in deltas) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HI, extra_body={name: 3})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_content_parts_and_developer_messages(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=NAME, messages=HI)
    parts = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    )
    assert plain.usage is not None
    assert parts.usage is not None
    assert parts.usage.prompt_tokens == plain.usage.prompt_tokens


def test_n_choices_differ_and_come_in_order(random_client: openai.OpenAI) -> None:
    answer = random_client.completions.create(model=NAME, prompt="Once", max_tokens=12, n=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1
    stream = random_client.completions.create(model=NAME, prompt="Once", max_tokens=12, n=4, seed=1, stream=True)
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


def test_n_in_a_chat(random_client: openai.OpenAI) -> None:
    answer = random_client.chat.completions.create(model=NAME, messages=HI, n=3, max_tokens=8, seed=2)
    texts = dict.fromkeys(range(3), "")
    stream = random_client.chat.completions.create(model=NAME, messages=HI, n=3, max_tokens=8, seed=2, stream=True)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in answer.choices]


def test_a_seed_repeats_and_the_servers_own_can_be_replayed(random_client: openai.OpenAI) -> None:
    def run(**options: object) -> openai.types.CompletionChoice:
        answer = random_client.completions.create(model=NAME, prompt="Once", max_tokens=24, **options)  # type: ignore[call-overload]
        return answer.choices[0]

    assert run(seed=7).text == run(seed=7).text
    drawn = [run() for _ in range(4)]
    assert len({choice.text for choice in drawn}) > 1
    for choice in drawn[:2]:
        seed = choice.model_extra["seed"]  # type: ignore[index]
        assert run(seed=seed).text == choice.text


def test_neighbors_do_not_change_a_draw(random_client: openai.OpenAI) -> None:
    alone = random_client.completions.create(model=NAME, prompt="Once", max_tokens=24, seed=3).choices[0].text
    crowd = random_client.completions.create(model=NAME, prompt=["One", "Once", "Two"], max_tokens=24, seed=3)
    assert crowd.choices[1].text == alone


def test_several_prompts_as_text_and_as_ids(client: openai.OpenAI) -> None:
    texts = client.completions.create(model=NAME, prompt=["Say", "Tell"], max_tokens=100, n=2)
    assert [choice.text for choice in texts.choices] == [REPLY] * 4
    ids = tokenizer().encode("Say")
    for prompt in (ids, [ids, ids]):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=100)
        assert {choice.text for choice in answer.choices} == {REPLY}
        assert len(answer.choices) == (2 if isinstance(prompt[0], list) else 1)


def test_stop_strings_end_and_disappear(client: openai.OpenAI) -> None:
    for stop in (" and", [" and", "zzz"]):
        answer = client.completions.create(model=NAME, prompt="Say", max_tokens=100, stop=stop)
        assert answer.choices[0].text == "Hello there, é"
        assert answer.choices[0].finish_reason == "stop"
        chunks = client.completions.create(model=NAME, prompt="Say", max_tokens=100, stop=stop, stream=True)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello there, é"
    kept = client.completions.create(
        model=NAME, prompt="Say", max_tokens=100, stop="th", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "Hello th"


def test_logit_bias_forces_and_forbids(random_client: openai.OpenAI) -> None:
    (token,) = tokenizer().encode("Z")
    forced = random_client.completions.create(
        model=NAME,
        prompt="Once",
        max_tokens=5,
        logit_bias={str(token): 1000.0},  # type: ignore[dict-item]
    )
    assert forced.choices[0].text == "ZZZZZ"


def test_completions_have_logprobs_in_the_shape_of_openai(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model=NAME, prompt="Say", max_tokens=100, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    # "é" is two bytes here, each a token of its own; both belong to the character at 13.
    assert "bytes:\\xc3" in logprobs.tokens
    position = logprobs.tokens.index("bytes:\\xc3")
    assert logprobs.text_offset[position : position + 3] == [13, 13, 14]
    for token, offset in zip(logprobs.tokens[:position], logprobs.text_offset, strict=False):
        assert REPLY.startswith(token, offset)
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


def test_streamed_logprobs_are_the_same_lists(client: openai.OpenAI) -> None:
    options = {"model": NAME, "prompt": "Say", "max_tokens": 100, "logprobs": 1, "echo": True}
    whole = client.completions.create(**options).choices[0].logprobs  # type: ignore[call-overload]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    streamed: dict[str, list[object]] = {name: [] for name in names}
    for chunk in client.completions.create(**options, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            if choice.logprobs is not None:
                for name in names:
                    streamed[name] += getattr(choice.logprobs, name)
    assert streamed == {name: getattr(whole, name) for name in names}


def test_chats_have_logprobs_in_the_shape_of_openai(client: openai.OpenAI) -> None:
    options = {"model": NAME, "messages": HI, "logprobs": True, "top_logprobs": 3}
    logprobs = client.chat.completions.create(**options).choices[0].logprobs  # type: ignore[call-overload]
    data = bytes(byte for row in logprobs.content[:-1] for byte in row.bytes)  # the last one ends the text
    assert data.decode() == REPLY
    assert all(len(row.top_logprobs) == 3 for row in logprobs.content)
    assert all(row.logprob == row.top_logprobs[0].logprob for row in logprobs.content)
    streamed = [
        row
        for chunk in client.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
        for choice in chunk.choices
        if choice.logprobs
        for row in choice.logprobs.content
    ]
    assert streamed == logprobs.content


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="Say", max_tokens=100, echo=True)
    assert answer.choices[0].text == "Say" + REPLY
    chunks = client.completions.create(model=NAME, prompt="Say", max_tokens=100, echo=True, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Say" + REPLY
    ids = tokenizer().encode("Say")
    assert client.completions.create(model=NAME, prompt=ids, echo=True).choices[0].text.startswith("SayHello")


def test_scoring_gives_what_generating_gave(random_client: openai.OpenAI) -> None:
    written = random_client.completions.create(
        model=NAME, prompt="Once", max_tokens=12, seed=5, logprobs=0, echo=True
    ).choices[0]
    assert written.logprobs is not None
    scored = random_client.completions.create(model=NAME, prompt=written.text, max_tokens=0, echo=True, logprobs=0)
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].text == written.text
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    if (
        logprobs.tokens == written.logprobs.tokens
    ):  # the text may be spelled by other tokens than those it was written with
        assert logprobs.token_logprobs == pytest.approx(written.logprobs.token_logprobs)
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(isinstance(value, float) for value in logprobs.token_logprobs[1:])


def test_best_of_is_the_best_of_n(random_client: openai.OpenAI) -> None:
    options = {"model": NAME, "prompt": "Once", "max_tokens": 8, "seed": 4, "logprobs": 0}
    every = random_client.completions.create(**options, n=6).choices  # type: ignore[call-overload]
    means = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in every]
    best = random_client.completions.create(**options, best_of=6)  # type: ignore[call-overload]
    assert [choice.text for choice in best.choices] == [every[means.index(max(means))].text]
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in every)
    bare = random_client.completions.create(**(options | {"logprobs": None}), best_of=2)  # type: ignore[call-overload]
    assert bare.choices[0].logprobs is None


def test_fields_of_open_servers(random_client: openai.OpenAI) -> None:
    greedy = random_client.completions.create(model=NAME, prompt="Once", max_tokens=8, temperature=0)
    top_1 = random_client.completions.create(model=NAME, prompt="Once", max_tokens=8, extra_body={"top_k": 1})
    top_p = random_client.completions.create(model=NAME, prompt="Once", max_tokens=8, top_p=1e-9)
    assert greedy.choices[0].text == top_1.choices[0].text == top_p.choices[0].text
    for refused in ({"min_p": 2.0}, {"typical_p": 0.0}, {"repetition_penalty": 0.0}, {"top_k": -2}):
        with pytest.raises(openai.BadRequestError, match=f"{next(iter(refused))} is"):
            random_client.completions.create(model=NAME, prompt="Once", extra_body=refused)


def test_ignore_eos_min_tokens_and_stop_token_ids(client: openai.OpenAI) -> None:
    def run(**extra: object) -> openai.types.Completion:
        return client.completions.create(model=NAME, prompt="Say", max_tokens=40, extra_body=extra)

    long = run(ignore_eos=True)
    assert long.usage is not None
    assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (40, "length")
    least = run(min_tokens=NUM_TOKENS + 2)
    assert least.usage is not None
    assert least.usage.completion_tokens >= NUM_TOKENS + 2
    (comma,) = tokenizer().encode(",")
    assert run(stop_token_ids=[comma]).choices[0].text in ("Hello there", "Hello there,")


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=HI, user="me", metadata={"a": "b"}, store=True, extra_body={"from_the_future": [1, {}]}
    )
    assert answer.choices[0].message.content == REPLY


def test_the_official_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'nope' is not served here; served: 'scripted'"):
        client.models.retrieve("nope")


def test_errors_reach_the_client_readable(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="Say", max_tokens=100_000)
    body = refused.value.body
    assert isinstance(body, dict)
    assert body["code"] == "context_length_exceeded"
    assert body["param"] == "max_tokens"
    assert "the prompt has 3 tokens, and with max_tokens of 100000 that is 100003" in refused.value.message
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.chat.completions.create(model="gpt-4", messages=HI)  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="temperature is 101"):
        client.chat.completions.create(model=NAME, messages=HI, temperature=101, stream=True)


def test_the_official_client_gets_tool_calls() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
    with (
        served(scripted_model(next_token=saying(call))) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"model": NAME, "messages": HI, "tools": tools}
        choice = client.chat.completions.create(**options).choices[0]  # type: ignore[call-overload]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (made,) = choice.message.tool_calls
        assert (made.type, made.function.name) == ("function", "get_time")
        assert json.loads(made.function.arguments) == {"city": "Oslo"}

        chunks = list(client.chat.completions.create(**options, stream=True))  # type: ignore[call-overload]
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        pieces = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
        assert (pieces[0].index, pieces[0].function.name) == (0, "get_time")
        assert json.loads("".join(piece.function.arguments for piece in pieces)) == {"city": "Oslo"}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

        bare = client.chat.completions.create(model=NAME, messages=HI).choices[0]  # type: ignore[list-item]
        assert (bare.message.content, bare.finish_reason) == (call, "stop")
        none = client.chat.completions.create(**options, tool_choice="none").choices[0]  # type: ignore[call-overload]
        assert none.message.content == call


async def test_many_clients_at_once(server: str) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=server + "/v1", api_key="none", max_retries=0) as client:

        async def stream(i: int) -> str:
            chunks = await client.completions.create(model=NAME, prompt=f"Say {i}", max_tokens=100, stream=True)
            return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

        assert await asyncio.gather(*(stream(i) for i in range(32))) == [REPLY] * 32
