"""Tests of the text form of messages: written messages can be read again, any input can be decoded or refused, and old
peers see known fields."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.lmtp.client_decoding import decode_answers
from bridle.lmtp.decoding import decode_request
from bridle.lmtp.encoding import MAX_ANSWER_CHARS, MIN_LOGPROB, encode_answers, encode_request
from bridle.lmtp.messages import (
    Answer,
    Buffer,
    Cancel,
    EventMessage,
    Failure,
    Generate,
    ModelInfo,
    Msg,
    Rejected,
    Request,
    Resume,
    Score,
    Token,
    ToolResult,
    features_of,
)

ids = st.integers(-(2**63) + 1, 2**63 - 1) | st.text(max_size=20)
names = st.text(min_size=1, max_size=20)
tokens = st.lists(st.integers(0, 2**31), max_size=8).map(tuple)
prompts = tokens | st.text(max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
positions = st.integers(0, 2**31)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
generates = st.builds(
    Generate,
    stream_id=ids,
    model=st.text(max_size=20),
    prompt=prompts,
    max_tokens=st.integers(-5, 2**40),
    temperature=numbers,
    top_logprobs=st.integers(-5, 200),
    logit_bias=st.dictionaries(st.integers(-5, 2**31), numbers, max_size=5),
    options=st.dictionaries(st.sampled_from(["top_p", "seed", "stop", "foo"]), st.integers(), max_size=3),
    text=st.none() | st.booleans(),
    buffer=st.none() | names,
    save=st.none() | names,
    key=st.none() | names,
    position=positions,
    controller=st.none() | names,
    constraint=st.none() | st.dictionaries(names, st.text(max_size=5), max_size=2),
    adapter=st.none() | names,
    rewind=st.sampled_from(["hold", "event"]),
)
requests = st.one_of(
    generates,
    st.builds(
        Score, stream_id=ids, model=st.text(max_size=20), scored=prompts, prompt=prompts, buffer=st.none() | names
    ),
    st.builds(ModelInfo, stream_id=ids, model=st.text(max_size=20), data=st.dictionaries(names, numbers, max_size=2)),
    st.builds(Cancel, stream_id=ids),
    st.builds(ToolResult, stream_id=ids, id=names, result=json_values, error=st.none() | st.text(max_size=9)),
    st.builds(Resume, stream_id=ids, key=names, position=positions),
    st.builds(
        Buffer,
        stream_id=ids,
        model=st.text(max_size=20),
        name=names,
        prompt=prompts,
        parent=st.none() | names,
        length=st.none() | positions,
        drop=st.booleans(),
    ),
)
answers = st.one_of(
    st.builds(
        Token,
        stream_id=ids,
        token=st.integers(0, 2**31),
        logprob=numbers,
        finish_reason=st.sampled_from([None, "stop", "length"]),
        top_logprobs=st.none() | st.dictionaries(st.integers(0, 2**31), numbers, max_size=3),
        text=st.none() | st.text(max_size=5),
        position=st.none() | positions,
        branch=st.integers(0, 9),
    ),
    st.builds(
        Failure,
        stream_id=ids,
        error=st.text(max_size=20),
        code=names,
        retryable=st.booleans(),
        retry_after=st.none() | numbers,
        param=st.none() | names,
    ),
    st.builds(Msg, stream_id=st.none() | ids, model_info=st.none() | names, error=st.none() | names),
    st.builds(
        EventMessage,
        event=names,
        stream_id=st.none() | ids,
        position=st.none() | positions,
        data=st.dictionaries(st.sampled_from(["branch", "num_tokens"]), positions),
    ),
)

FIELDS = [
    *("stream_id", "model", "prompt", "scored", "max_tokens", "temperature", "logit_bias", "top_logprobs", "text"),
    *("buffer", "save", "key", "position", "controller", "constraint", "adapter", "rewind", "data", "name", "drop"),
]


@given(requests)
def test_requests_survive_the_wire(request_: Request) -> None:
    message = encode_request(request_)
    assert "\n" not in message
    assert decode_request(message) == request_


@given(st.lists(answers, max_size=6))
def test_answers_survive_the_wire_in_order(given_answers: list[Answer]) -> None:
    messages = list(encode_answers(given_answers))
    assert [answer for message in messages for answer in decode_answers(message)] == given_answers
    for message in messages:
        assert "\n" not in message
        json.loads(message.partition(" ")[2], parse_constant=pytest.fail)


@given(
    st.sampled_from(["GENERATE", "SCORE", "MODEL_INFO", "CANCEL", "RESUME", "BUFFER", "generate", "", "FOO"]),
    st.text(max_size=30)
    | json_values.map(json.dumps)
    | st.dictionaries(st.sampled_from(FIELDS), json_values).map(json.dumps),
)
def test_whatever_comes_is_read_or_rejected(kind: str, payload: str) -> None:
    message = decode_request(f"{kind} {payload}")
    if isinstance(message, Rejected):
        assert str(message.error)
        assert message.stream_id is None or message.stream_id == json.loads(payload)["stream_id"]
    else:
        assert decode_request(encode_request(message)) == message


@pytest.mark.parametrize(
    ("message", "stream_id", "error"),
    [
        ('GENERATE {"model": "t', None, "not JSON"),
        ("PING", None, "'PING' is not a message"),
        ("GENERATE []", None, "one JSON object"),
        ('GENERATE {"prompt": [1], "stream_id": 9}', 9, "'model' is missing"),
        ('GENERATE\n{"model": "m", "prompt": [1], "stream_id": 1}', None, "is not a message"),
        ('GENERATE {"model": "m", "prompt": [1]}', None, "'stream_id' is missing"),
        ('GENERATE {"model": "m", "prompt": [1], "stream_id": true}', None, "must be an integer or a string"),
        ('GENERATE {"model": "m", "prompt": [1], "stream_id": 1.0}', None, "must be an integer or a string"),
        ('GENERATE {"model": "m", "stream_id": 3}', 3, "'prompt' is missing"),
        ('SCORE {"model": "m", "prompt": [1], "stream_id": "5"}', "5", "'scored' is missing"),
        ('GENERATE {"model": "m", "prompt": [1.0], "stream_id": 3}', 3, "list of token ids"),
        ('GENERATE {"model": "m", "prompt": [true], "stream_id": 3}', 3, "list of token ids"),
        ('GENERATE {"logit_bias": {"a": 1}, "model": "m", "prompt": [1], "stream_id": 3}', 3, "ids to numbers"),
        ('GENERATE {"logit_bias": {"1": null}, "model": "m", "prompt": [1], "stream_id": 3}', 3, "ids to numbers"),
        ('GENERATE {"max_tokens": "2", "model": "m", "prompt": [1], "stream_id": 3}', 3, "max_tokens is '2'"),
        ('generate {"model": "m", "prompt": [1], "stream_id": 1}', 1, "Unknown command: generate"),
        ('RESUME {"stream_id": 1}', 1, "'key' is missing"),
        ('RESUME {"stream_id": 1, "key": "k", "position": -1}', 1, "position is -1"),
        ("GENERATE " + "[" * 100_000, None, "not JSON"),
    ],
)
def test_what_is_wrong_is_said(message: str, stream_id: Any, error: str) -> None:
    rejected = decode_request(message)
    assert isinstance(rejected, Rejected)
    assert rejected.stream_id == stream_id
    assert error in str(rejected.error)


def test_nulls_mean_defaults_in_messages() -> None:
    message = decode_request(
        'GENERATE  {"model": "m", "prompt": [1, null, 2], "stream_id": 1, "logit_bias": null, "temperature": null}\n'
    )
    assert message == Generate(stream_id=1, model="m", prompt=(1, 2), top_logprobs=1)
    message = decode_request('GENERATE {"logit_bias": {"7": "3.5"}, "model": "m", "prompt": [1], "stream_id": 1}')
    assert isinstance(message, Generate)
    assert message.logit_bias == {7: 3.5}


def test_a_server_never_sends_what_json_has_not() -> None:
    token = Token(stream_id=1, token=2, logprob=-math.inf, top_logprobs={2: -math.inf, 3: math.nan, 4: -1.0})
    (message,) = encode_answers([token])
    (read,) = decode_answers(message)
    assert isinstance(read, Token)
    assert read.logprob == MIN_LOGPROB
    assert read.top_logprobs == {2: MIN_LOGPROB, 3: MIN_LOGPROB, 4: -1.0}


def test_the_form_of_the_original() -> None:
    token = Token(stream_id=1, token=240, logprob=-5.25, finish_reason=None, top_logprobs={240: -5.25})
    assert list(encode_answers([token])) == [
        'TOKEN [{"token": 240, "stream_id": 1, "logprob": -5.25, "finish_reason": null, '
        '"top_logprobs": {"240": -5.25}}]'
    ]
    score = Token(stream_id="abc", token=12, logprob=-5.5, finish_reason="stop")
    assert list(encode_answers([score])) == [
        'TOKEN [{"token": 12, "stream_id": "abc", "logprob": -5.5, "finish_reason": "stop"}]'
    ]
    assert list(encode_answers([Msg(stream_id=None, error="x")])) == ['MSG [{"stream_id": null, "error": "x"}]']


def test_answers_are_cut_into_messages_that_every_client_takes() -> None:
    events = [EventMessage(event="log", stream_id=1, data={"text": "x" * 4000, "n": n}) for n in range(600)]
    messages = list(encode_answers(events))
    assert 1 < len(messages) < 10
    assert all(len(message) < MAX_ANSWER_CHARS + 5000 for message in messages)
    assert [answer for message in messages for answer in decode_answers(message)] == events


def test_clients_read_what_servers_really_send() -> None:
    doubled = 'TOKEN [{"token": 1, "stream_id": 1, "logprob": -Infinity, "foo": 2, "top_logprobs": {"1": -Infinity}}]\n'
    (token,) = decode_answers(doubled)
    assert isinstance(token, Token)
    assert token.logprob == -math.inf
    assert token.finish_reason is None
    (bare,) = decode_answers('MSG {"stream_id": 1, "model_info": {"model": "m"}}')
    assert bare == Msg(stream_id=1, model_info={"model": "m"})
    assert features_of(bare) == {}
    assert decode_answers("SYS [1]") == decode_answers("PING") == decode_answers('TOKEN [{"token": 1}, 5]') == []
