"""What a field of `SamplingParams` is, it is everywhere: on each API, on wires to shards and replicas, to controllers.

A field is written once, with its meaning. A list of fields that is not derived from that is compared with it here, so
that a new one cannot be forgotten: `test_a_new_field_is_missed` adds one and looks who notices.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridle.cluster.proto import shard_pb2 as pb
from bridle.cluster.replica_messages import frame, pack_request, read_by_replica
from bridle.cluster.samplings import decode_sampling, encode_sampling
from bridle.http.openai.derived import derived_fields
from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.http.tgi.schemas import Parameters
from bridle.lmtp.messages import Generate
from bridle.lmtp.server.requests import OPTIONS, options_of
from bridle.sampling import (
    OVERRIDABLE,
    SENT_WITH_DRAWS,
    Api,
    Meaning,
    SamplingParams,
    Watermark,
    _draw,
    fields_on,
    meanings,
)
from tests.engine.support import make_request
from tests.sources import GUESTS

#: For each field a value that is not its default.
OTHER: Mapping[str, Any] = {
    "n": 2,
    "max_tokens": 7,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 4,
    "min_p": 0.125,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.5},
    "seed": 11,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 0,
    "logprobs_mode": "processed",
    "prompt_logprobs": 2,
    "prompt_logprobs_start": 1,
    "skip_special_tokens": False,
    "watermark": Watermark(0.25, 3.0),
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "mirostat": 2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.25,
    "dry_multiplier": 0.75,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": (";",),
    "dry_breaker_ids": (4, 9),
    "bad_words": ("no",),
    "banned_phrases": ("as an AI",),
    "allowed_token_ids": (4, 9),
    "bias_texts": (("so", 1.5),),
    "bad_words_ids": ((4, 9), (3,)),
    "speculate": 4,
    "prediction": "so",
    "prediction_ids": (3, 4),
}
NAMES = [each.name for each in fields(SamplingParams)]


def taken(api: Api) -> set[str]:
    """The names that the messages of an API have."""
    if api == "openai":
        return set(CompletionBody.model_fields)
    if api == "tgi":
        return set(Parameters.model_fields)
    return {each.name for each in fields(Generate)} | set(OPTIONS)


def missing(api: Api, params: type[SamplingParams] = SamplingParams) -> set[str]:
    """Names that fields have on an API which does not know them."""
    names = {meaning.names.get(api, name) for name, meaning in meanings(params).items()}
    return {name for name in names if name is not None} - taken(api)


def unsent(params: type[SamplingParams] = SamplingParams) -> set[str]:
    """Fields that a shard needs and its protocol lacks."""
    known = {each.name for each in pb.Sampling.DESCRIPTOR.fields}
    formed = {"logit_bias": "bias_values", "logprobs_mode": "processed_logprobs"}
    sent = [name for name, meaning in meanings(params).items() if meaning.part != "output"]
    return {name for name in sent if formed.get(name, name) not in known}


def test_every_field_says_what_it_is() -> None:
    assert all(isinstance(meaning, Meaning) for meaning in meanings().values())
    assert set(OTHER) == set(NAMES)
    assert {name for name, value in OTHER.items() if value == getattr(SamplingParams(), name)} == set()


@pytest.mark.parametrize("api", ["openai", "tgi", "lmtp"])
def test_an_api_takes_what_the_fields_say(api: Api) -> None:
    assert missing(api) == set()


def test_a_shard_is_sent_what_draws_need() -> None:
    assert unsent() == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_field_goes_to_a_shard_if_a_draw_needs_it(name: str) -> None:
    sampling = SamplingParams(**{name: OTHER[name]})
    back = decode_sampling(pb.Sampling.FromString(encode_sampling(sampling, 3).SerializeToString()))
    expected = OTHER[name] if name in SENT_WITH_DRAWS else getattr(SamplingParams(), name)
    assert getattr(back, name) == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_field_goes_to_a_replica(name: str) -> None:
    request = make_request(**{name: OTHER[name]})
    message = read_by_replica(frame(pack_request(request))[4:])
    assert getattr(message, "sampling") == request.sampling  # noqa: B009 -- of one kind of message alone


@pytest.mark.parametrize("name", sorted(set(fields_on("openai")) - {"max_tokens", "logprobs", "prompt_logprobs"}))
def test_a_field_goes_through_the_bodies_of_openai(name: str) -> None:
    value = OTHER[name]
    plain = {"gamma": value.gamma, "delta": value.delta} if isinstance(value, Watermark) else value
    plain = {str(token): bias for token, bias in value.items()} if name == "logit_bias" else plain
    plain = list(value) if isinstance(value, tuple) else plain
    for body in (
        CompletionBody.model_validate({"prompt": "x", name: plain}),
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], name: plain}),
    ):
        assert getattr(body.sampling(), name) == value


def test_controllers_may_change_draws_alone() -> None:
    assert {name for name in OVERRIDABLE if meanings()[name].part != "draw"} == set()
    script = next(Path(GUESTS).glob("pyctrl/guest/pyaici/results.py"))
    (listed,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(script.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SAMPLING"
    ]
    assert set(listed) == OVERRIDABLE


@dataclass(frozen=True, slots=True)
class More(SamplingParams):
    top_a: float = _draw(0.0)


def test_a_new_field_travels() -> None:
    """Whoever adds one writes it once: bodies, GENERATE and replicas derive it."""
    for api in ("openai", "tgi"):
        body = derived_fields(api, More).model_validate({"top_a": 0.5})
        assert getattr(body, "top_a") == 0.5  # noqa: B009 -- derived
    assert "top_a" in fields_on("lmtp", More) and "top_a" in options_of(More)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(More(top_a=0.5)), type=More)
    assert back.top_a == 0.5


def test_a_new_field_is_missed() -> None:
    """What is written by hand hears of it: the protocol of shards."""
    assert missing("openai", More) == missing("tgi", More) == {"top_a"}
    assert unsent(More) == {"top_a"}
