"""Tests that each field of `SamplingParams` is supported everywhere: on each API, on the command line, in messages to
shards and replicas, and in controllers. A field is defined once, with its metadata. Handwritten lists of fields are
compared with it, so that no new field is forgotten. `test_a_new_field_is_missed` adds a field, which the comparisons
must find."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cyclopts import CycloptsError

from bridle.cli.app import app
from bridle.cli.chat import chat
from bridle.cli.derived_options import derived_options
from bridle.cli.generate import generate
from bridle.cli.options import SamplingOptions
from bridle.distributed.codec.sampling_params import decode_sampling, encode_sampling
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.replica_messages import Submit, frame, pack_request, read_by_replica
from bridle.errors import InvalidRequest
from bridle.http.openai.sampling_fields import derived_fields
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
    _draw,
    fields_on,
    meanings,
)
from bridle.sampling_values import Watermark
from bridle.serving.requests.steering import Controllers
from tests.engine.support import make_request
from tests.fakes.sampling_fields import OTHER
from tests.sources import GUESTS

NAMES = [each.name for each in fields(SamplingParams)]


def taken(api: Api) -> set[str]:
    """Return the field names in the messages of an API."""
    if api == "openai":
        return set(CompletionBody.model_fields)
    if api == "tgi":
        return set(Parameters.model_fields)
    return {each.name for each in fields(Generate)} | set(OPTIONS)


def missing(api: Api, params: type[SamplingParams] = SamplingParams) -> set[str]:
    """Return the names that fields should have on an API and that its messages lack."""
    names = {meaning.names.get(api, name) for name, meaning in meanings(params).items()}
    return {name for name in names if name is not None} - taken(api)


def unsent(params: type[SamplingParams] = SamplingParams) -> set[str]:
    """Return the fields that a shard needs and the shard protocol lacks."""
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


def test_a_field_goes_to_a_shard_if_a_draw_needs_it() -> None:
    for name in NAMES:
        sampling = SamplingParams(**{name: OTHER[name]})
        back = decode_sampling(pb.Sampling.FromString(encode_sampling(sampling, 3).SerializeToString()))
        expected = OTHER[name] if name in SENT_WITH_DRAWS else getattr(SamplingParams(), name)
        assert getattr(back, name) == expected, name


def test_every_field_goes_to_a_replica() -> None:
    for name in NAMES:
        request = make_request(**{name: OTHER[name]})
        message = read_by_replica(frame(pack_request(request))[4:])
        assert isinstance(message, Submit)
        assert message.request.sampling == request.sampling, name


def test_a_field_goes_through_the_bodies_of_openai() -> None:
    for name in set(fields_on("openai")) - {"max_tokens", "logprobs", "prompt_logprobs"}:
        value = OTHER[name]
        plain = {"gamma": value.gamma, "delta": value.delta} if isinstance(value, Watermark) else value
        plain = {str(token): bias for token, bias in value.items()} if name == "logit_bias" else plain
        plain = list(value) if isinstance(value, tuple) else plain
        for body in (
            CompletionBody.model_validate({"prompt": "x", name: plain}),
            ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], name: plain}),
        ):
            assert getattr(body.sampling(), name) == value, name


def flags(name: str, value: Any) -> list[str]:
    """Return the command line flags for a field's value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    items = value if isinstance(value, tuple) else (value,)
    if isinstance(value, Mapping):
        items = tuple(f"{token}={bias}" for token, bias in value.items())
    return [word for item in items for word in (f"--{flag}", str(item))]


def parsed(command: str, *words: str) -> SamplingOptions:
    called, bound, _ = app.parse_args([command, "demo", *words], exit_on_error=False, print_error=False)
    assert called in (generate, chat)
    options: SamplingOptions = bound.arguments["sampling"]
    return options


def on_command_line(command: str, *words: str) -> SamplingParams:
    return parsed(command, *words).to_params()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_field_is_a_flag(command: str) -> None:
    expected = {name: OTHER[name] for name in fields_on("cli")} | {"watermark": Watermark()}
    alone = expected.pop("aligned")  # it goes with few others
    assert on_command_line(command, *flags("aligned", alone), "--temperature", "1").aligned == alone
    given = [word for name, value in expected.items() if name != "watermark" for word in flags(name, value)]
    found = on_command_line(command, *given, "--watermark")
    assert {name: getattr(found, name) for name in expected} == expected
    bare = on_command_line(command, "--sampling", "seed=3")
    assert not [name for name, value in expected.items() if getattr(bare, name) == value]


@pytest.mark.parametrize(("word", "number"), [("auto", -1), ("off", 0), ("8", 8)])
def test_the_command_line_takes_words_for_drafts(word: str, number: int) -> None:
    assert on_command_line("generate", "--speculate", word).speculate == number


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--speculate", "often"], "speculate is 'often'; must be 'off', 'auto', or a number of tokens up to 64"),
        (["--speculate", "65"], "speculate is 65; must be between -1 and 64"),
        (["--logit-bias", "so"], "--logit-bias is 'so'; must be TOKEN=ADDEND"),
        (["--logit-bias", "3=much"], "--logit-bias is '3=much'; must be TOKEN=ADDEND"),
        (["--logit-bias", "=1"], "--logit-bias is '=1'; must be TOKEN=ADDEND"),
        (["--xtc-threshold", "2"], "xtc_threshold is 2.0; must be more than 0 and at most 1"),
    ],
)
def test_the_command_line_refuses_what_a_field_does(words: list[str], told: str) -> None:
    with pytest.raises((InvalidRequest, CycloptsError), match=re.escape(told)):
        on_command_line("generate", *words)


@pytest.mark.parametrize(
    ("flag", "controllers", "expected"),
    [
        ("--ignore-eos", [], True),
        ("--no-ignore-eos", [{"controller": "mine"}], False),
        ("--seed=1", [{"controller": "mine"}], True),
        ("--seed=1", [], False),
    ],
)
def test_what_is_said_of_the_end_token_counts(flag: str, controllers: list[dict[str, Any]], expected: bool) -> None:
    model: Any = SimpleNamespace(defaults={})
    params = parsed("generate", flag).to_params(model, Controllers(controllers=controllers))
    assert params.ignore_eos is expected


def test_a_bias_of_a_text_is_one_on_the_command_line() -> None:
    params = on_command_line("generate", "--logit-bias", "a=b=-1.5", "--logit-bias", "7=2")
    assert params.bias_texts == (("a=b", -1.5),) and params.logit_bias == {7: 2.0}


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
    """Request bodies, command line flags, GENERATE and replicas derive their fields from one definition."""
    for api in ("openai", "tgi"):
        body = derived_fields(api, More).model_validate({"top_a": 0.5})
        assert getattr(body, "top_a") == 0.5  # noqa: B009 -- derived
    assert derived_options(More)(top_a=0.5).top_a == 0.5
    assert "top_a" in fields_on("lmtp", More) and "top_a" in options_of(More)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(More(top_a=0.5)), type=More)
    assert back.top_a == 0.5


def test_a_new_field_is_missed() -> None:
    """The comparisons report a new field that the APIs and the shard protocol lack."""
    assert missing("openai", More) == missing("tgi", More) == {"top_a"}
    assert unsent(More) == {"top_a"}
