"""Tests of replays of recorded exchanges with LMQL's server: bridle's answers have the same form, without that server's
faults.

The requests are the recorded ones. The scripted model has the same vocabulary (346 ids; id 0 begins and ends a text).
The model always prefers token 240, like the recorded model. Its log-probabilities differ from the recorded ones, so the
tests compare their form, not their digits. If LMQL's server repeats or mixes answers, hangs or closes the connection,
bridle does what `docs/lmtp.md` describes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bridle.config import EngineConfig
from bridle.engine import AsyncEngine, Engine
from bridle.serving import LoadedModel
from bridle.testing.scripted import ScriptedExecutor
from tests.lmtp.harness import Object, Setup, Wire, running
from tests.serving.fakes import ByteTokenizer

TOKEN_KEYS = ["token", "stream_id", "logprob", "finish_reason", "top_logprobs"]
SCORE_KEYS = TOKEN_KEYS[:4]


class TraceTokenizer(ByteTokenizer):
    vocab_size = 346
    eos_token_ids = (0,)
    bos_token_id = 0


def trace_model() -> LoadedModel:
    executor = ScriptedExecutor(
        vocab_size=346,
        num_blocks=64,
        block_size=16,
        max_model_len=256,
        eos_token_ids=(0,),
        next_token=lambda prefix: 240,
    )
    client = AsyncEngine(Engine(executor, EngineConfig())).start()
    tokenizer: Any = TraceTokenizer()
    return LoadedModel("tiny-gpt2", client, tokenizer, shutdown=client.close)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with running(trace_model()) as setup:
        yield setup


async def replay(setup: Setup, frame: str, stream_id: Any = 1) -> list[Object]:
    """Replay one recorded frame, and return the objects of its answer."""
    wire = setup.connect()
    await wire.link.send(frame)
    found = await wire.stream(stream_id)
    assert all(isinstance(json.loads(sent.partition(" ")[2]), list) for sent in wire.frames)
    return found


def generate(fields: str, stream_id: int = 3) -> str:
    return f'GENERATE {{{fields}, "model": "tiny-gpt2", "prompt": [335, 330], "stream_id": {stream_id}}}'


def check_tokens(found: list[Object], num: int, finish: str, num_top: int = 1, keys: list[str] | None = None) -> None:
    """Check the rules that hold for the answers of every stream."""
    assert len(found) == num
    for body in found:
        assert list(body) == (keys or TOKEN_KEYS)
        assert type(body["token"]) is int
        assert -1e9 <= body["logprob"] <= 0
        if keys is None:
            assert body["top_logprobs"][str(body["token"])] == body["logprob"]
            assert num_top <= len(body["top_logprobs"]) <= num_top + 1
    assert [body["finish_reason"] for body in found] == [None] * (num - 1) + [finish]


async def test_a1_model_info_has_the_models_name_and_features(setup: Setup) -> None:
    frame = 'MODEL_INFO {"stream_id": 1, "model": "tiny-gpt2", "data": {"model": "tiny-gpt2"}}'
    (body,) = await replay(setup, frame)
    assert list(body) == ["kind", "stream_id", "model_info"]
    assert body["kind"] == "MSG"
    assert body["model_info"]["model"] == "tiny-gpt2"
    assert {"model_type", "constructor", "bridle"} <= set(body["model_info"])
    assert body["model_info"]["lmtp"]["cancel"] is True


async def test_a2_greedy_has_the_originals_tokens(setup: Setup) -> None:
    frame = (
        'GENERATE {"max_tokens": 3, "temperature": 0.0, "top_logprobs": 1, "model": "tiny-gpt2", '
        '"prompt": [335, 330], "stream_id": 1}'
    )
    found = await replay(setup, frame)
    check_tokens(found, 3, "length")  # three, where the original sends the last one twice
    assert [body["token"] for body in found] == [240, 240, 240]


async def test_a3_each_token_has_its_alternatives(setup: Setup) -> None:
    found = await replay(setup, generate('"max_tokens": 2, "temperature": 0.0, "top_logprobs": 3', 1))
    check_tokens(found, 2, "length", num_top=3)


async def test_a4_bias_allows_two_ids(setup: Setup) -> None:
    fields = '"max_tokens": 2, "temperature": 0.0, "logit_bias": {"5": 100, "6": 100}, "top_logprobs": 2'
    found = await replay(setup, generate(fields, 1))
    check_tokens(found, 2, "length", num_top=2)
    assert all(set(body["top_logprobs"]) == {"5", "6"} for body in found)


async def test_a5_bias_forbids_one_and_is_a_string(setup: Setup) -> None:
    fields = '"max_tokens": 1, "logit_bias": {"240": -100, "5": "35"}'
    found = await replay(setup, generate(fields, 1))
    check_tokens(found, 1, "length")
    assert found[0]["token"] == 5


async def test_a6_the_end_token_is_sent_once(setup: Setup) -> None:
    found = await replay(setup, generate('"max_tokens": 4, "logit_bias": {"0": 100}', 1))
    check_tokens(found, 1, "stop")
    assert found[0]["token"] == 0


async def test_a7_sampling_takes_the_originals_fields(setup: Setup) -> None:
    fields = '"max_tokens": 1, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1'
    check_tokens(await replay(setup, generate(fields, 1)), 1, "length")


async def test_a8_more_alternatives_than_the_sampler_keeps(setup: Setup) -> None:
    fields = '"max_tokens": 1, "temperature": 1.2, "top_logprobs": 53, "top_k": 50'
    check_tokens(await replay(setup, generate(fields, 1)), 1, "length", num_top=53)


async def test_a9_a_score_has_the_tokens_scored(setup: Setup) -> None:
    frame = 'SCORE {"model": "tiny-gpt2", "prompt": [335, 330], "scored": [12, 13, 14], "stream_id": 1}'
    found = await replay(setup, frame)
    check_tokens(found, 3, "stop", keys=SCORE_KEYS)
    assert [body["token"] for body in found] == [12, 13, 14]


async def test_a10_the_first_of_all_has_no_predecessor(setup: Setup) -> None:
    found = await replay(setup, 'SCORE {"model": "tiny-gpt2", "prompt": [], "scored": [12, 13], "stream_id": 1}')
    check_tokens(found, 2, "stop", keys=SCORE_KEYS)
    assert found[0]["logprob"] == 0.0 > found[1]["logprob"]


async def test_a11_nothing_to_score(setup: Setup) -> None:
    (body,) = await replay(setup, 'SCORE {"model": "tiny-gpt2", "prompt": [335, 330], "scored": [], "stream_id": 1}')
    assert "at least one token" in body["error"]


async def test_a12_score_ignores_what_is_not_its_own(setup: Setup) -> None:
    more = '"temperature": 1.0, "max_tokens": 5, "foo": 1, "logit_bias": {"12": 100}'
    rest = '"model": "tiny-gpt2", "prompt": [335, 330], "scored": [12], "stream_id": 1'
    assert await replay(setup, f"SCORE {{{more}, {rest}}}") == await replay(setup, f"SCORE {{{rest}}}")


async def test_a13_a14_nothing_leaks_in_a_batch(setup: Setup) -> None:
    wire = setup.connect()
    for frame in (
        generate('"max_tokens": 1', 1),
        generate('"max_tokens": 3, "top_logprobs": 2', 2),
        generate('"max_tokens": 2, "temperature": 1.0', 3),
        'SCORE {"model": "tiny-gpt2", "prompt": [335], "scored": [330, 5], "stream_id": 4}',
        'SCORE {"model": "tiny-gpt2", "prompt": [335, 1, 2], "scored": [330], "stream_id": 5}',
        generate('"max_tokens": 1, "logit_bias": {"0": 100}', 6),
    ):
        await wire.link.send(frame)
    found: dict[Any, list[Object]] = {stream_id: [] for stream_id in range(1, 7)}
    while not all(bodies and bodies[-1]["finish_reason"] for bodies in found.values()):
        _, body = await wire.next()
        found[body["stream_id"]].append(body)
    check_tokens(found[1], 1, "length")
    check_tokens(found[2], 3, "length", num_top=2)
    check_tokens(found[3], 2, "length")
    check_tokens(found[4], 2, "stop", keys=SCORE_KEYS)
    check_tokens(found[5], 1, "stop", keys=SCORE_KEYS)
    check_tokens(found[6], 1, "stop")


async def test_a15_the_same_id_twice(setup: Setup) -> None:
    wire = setup.connect()
    await wire.link.send(generate('"max_tokens": 200', 1))
    await wire.link.send(generate('"max_tokens": 1', 1))
    *_, last = await wire.stream(1)
    assert last["code"] == "protocol_error"
    await setup.settle()
    check_tokens(await wire.ask("GENERATE", stream_id=1, model="tiny-gpt2", prompt=[335], max_tokens=1), 1, "length")


async def test_a16_ids_come_back_as_they_were(setup: Setup) -> None:
    frame = 'GENERATE {"max_tokens": 1, "model": "tiny-gpt2", "prompt": [335, 330], "stream_id": "abc"}'
    check_tokens(await replay(setup, frame, "abc"), 1, "length")


# Section B of the recording: the frame, the stream it is about, and what of the error must be readable. The original
# closes the connection, hangs, or answers with what its libraries said.
REFUSED = [
    ('FOO {"model": "tiny-gpt2", "stream_id": 9}', "MSG", 9, "Unknown command: FOO"),
    ('generate {"model": "tiny-gpt2", "prompt": [335], "stream_id": 1}', "MSG", 1, "Unknown command: generate"),
    ('GENERATE {"model": "t', "MSG", None, "not JSON"),
    ("PING", "MSG", None, "not a message"),
    ("GENERATE []", "MSG", None, "one JSON object"),
    ('GENERATE {"prompt": [1], "stream_id": 9}', "TOKEN", 9, "'model'"),
    ('GENERATE\n{"model": "tiny-gpt2", "prompt": [335], "stream_id": 1}', "MSG", None, "not a message"),
    ('GENERATE {"model": "tiny-gpt2", "prompt": [1]}', "MSG", None, "'stream_id'"),
    ('GENERATE {"model": "tiny-gpt2", "stream_id": 3}', "TOKEN", 3, "'prompt'"),
    ('SCORE {"model": "tiny-gpt2", "prompt": [1], "stream_id": 5}', "TOKEN", 5, "'scored'"),
    (generate('"logit_bias": {"a": 1}'), "TOKEN", 3, "logit_bias"),
    (generate('"max_tokens": 0'), "TOKEN", 3, "max_tokens is 0"),
    (generate('"max_tokens": "2"'), "TOKEN", 3, "max_tokens is '2'"),
    (generate('"max_tokens": 1, "foo": 1'), "TOKEN", 3, "'foo'"),
    ('GENERATE {"model": "tiny-gpt2", "prompt": [99999], "stream_id": 4}', "TOKEN", 4, "token 99999"),
    ('GENERATE {"model": "tiny-gpt2", "prompt": %s, "stream_id": 4}' % ([5] * 257), "TOKEN", 4, "257 tokens"),
    ('SCORE {"model": "tiny-gpt2", "prompt": [1], "scored": [99999], "stream_id": 6}', "TOKEN", 6, "token 99999"),
    (generate('"max_tokens": 1, "num_beams": 2'), "TOKEN", 3, "'num_beams'"),
    (generate('"max_tokens": 1, "use_beam_search": true'), "TOKEN", 3, "beam search works on /v1/completions"),
    ('GENERATE {"model": "other", "prompt": [1], "stream_id": 4}', "TOKEN", 4, "'other' is not served here"),
    ('SCORE {"model": "other", "prompt": [1], "scored": [2], "stream_id": 5}', "TOKEN", 5, "'other' is not served"),
    ('MODEL_INFO {"stream_id": 6, "model": "other", "data": {"model": "other"}}', "MSG", 6, "'other' is not served"),
]


@pytest.mark.parametrize(("frame", "kind", "stream_id", "text"), REFUSED)
async def test_b_c_refusals_keep_the_connection(setup: Setup, frame: str, kind: str, stream_id: Any, text: str) -> None:
    wire = setup.connect()
    await wire.link.send(frame)
    found_kind, body = await wire.next()
    assert (found_kind, body["stream_id"]) == (kind, stream_id)
    assert text in body["error"]
    if frame.startswith("MODEL_INFO"):  # the original client looks for it
        assert body["model_info"] == "<unavailable>"
    check_tokens(await wire.ask("GENERATE", stream_id=1, model="tiny-gpt2", prompt=[335], max_tokens=1), 1, "length")


# What the original refuses and a server should take.
TAKEN = [
    (generate('"logit_bias": null, "max_tokens": 1'), 3),
    (generate('"max_tokens": 1, "logit_bias": {"99999": 100}'), 3),
    (generate('"max_tokens": 1, "logit_bias": {"-1": 100}'), 3),
    (generate('"max_tokens": 1, "top_logprobs": 0'), 3),
    (generate('"max_tokens": 1, "presence_penalty": 0.5'), 3),
    (generate('"max_tokens": 1, "temperature": null'), 3),
    (generate('"max_tokens": 1, "temperature": -1'), 3),
    ('GENERATE {"max_tokens": 1, "model": "tiny-gpt2", "prompt": [], "stream_id": 4}', 4),
    ('GENERATE {"max_tokens": 1, "model": "tiny-gpt2", "prompt": [null], "stream_id": 4}', 4),
]


@pytest.mark.parametrize(("frame", "stream_id"), TAKEN)
async def test_b_what_is_taken_now(setup: Setup, frame: str, stream_id: int) -> None:
    found = await replay(setup, frame, stream_id)
    check_tokens(found, 1, "length")
    assert found[0]["token"] == 240


async def test_b18_more_alternatives_than_there_are(setup: Setup) -> None:
    check_tokens(await replay(setup, generate('"max_tokens": 1, "top_logprobs": 1000'), 3), 1, "length", num_top=100)


async def test_h_a_request_of_lmql_at_the_end_of_the_context(setup: Setup) -> None:
    wire: Wire = setup.connect()
    await wire.send("GENERATE", model="tiny-gpt2", prompt=[5] * 250, stream_id=1, max_tokens=128)
    check_tokens(await wire.stream(1), 6, "length")
