"""Tests of samplers and routes of other systems: each works, or is refused with the reason on the documentation page.
The compatibility tables have all names of those systems."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

import bridle
from bridle.compat.request_fields import BY_NAME, FIELDS
from bridle.compat.routes import ROUTES
from bridle.compat.schema import System
from bridle.sampling import SamplingParams, meanings
from dev.coming_from import NAMES, names, paths, sampler_meaning, sent
from dev.compat import WORDS
from dev.compat.samplers import SAMPLERS, CompatSampler
from tests.http.harness import local_client, scripted_model, served
from tests.serving.fakes import fake_model

BODY = {"prompt": "Say", "max_tokens": 24, "seed": 4, "temperature": 1.0, "ignore_eos": True}
#: Parameters that change how much is drawn or told, not what.
NO_SAMPLERS = {
    "n", "max_tokens", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "skip_special_tokens", "speculate",
    "include_stop_str_in_output", "prediction", "banned_phrases", "canonical",
    "constraint_report", "constraint_floor", "on_constraint_floor", "lookahead", "aligned",
    "token_healing", "describe_constraint", "control_vectors", "probes", "keep_best",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with served(scripted_model()) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


def drawn(client: httpx.Client, **more: Any) -> list[str]:
    answer = client.post("/v1/completions", json=BODY | {"logprobs": 0} | more)
    assert answer.status_code == 200, answer.text
    return [str(token) for token in answer.json()["choices"][0]["logprobs"]["tokens"]]


@pytest.mark.few(7)
@pytest.mark.parametrize("sampler", [each for each in SAMPLERS if each.example], ids=lambda each: str(each.name))
def test_a_sampler_changes_what_is_drawn(server: httpx.Client, sampler: CompatSampler) -> None:
    plain = drawn(server)
    assert drawn(server) == plain != drawn(server, **sampler.example)


def test_the_version_is_told_as_vllm_tells_it() -> None:
    with local_client(fake_model()) as client:
        assert client.get("/version").json() == {"version": bridle.__version__}


def test_samplers_that_act_on_the_end(server: httpx.Client) -> None:
    """The model samples the end token at once. Only fields that exclude this token give longer outputs."""
    end = {"logit_bias": {"1": 100.0, "2": 100.0, "0": 100.0}, "ignore_eos": False, "logprobs": None}
    count = [
        server.post("/v1/completions", json=BODY | end | more).json()["usage"]["completion_tokens"]
        for more in ({}, {"min_tokens": 5}, {"min_new_tokens": 5}, {"ignore_eos": True})
    ]
    assert count[0] < 5 <= count[1] == count[2] and count[3] == 24


def test_dry_looks_at_a_window(server: httpx.Client) -> None:
    body = {"dry_multiplier": 50.0, "dry_allowed_length": 0, "dry_sequence_breakers": ["~"]}
    assert drawn(server, **body, dry_penalty_last_n=0) == drawn(server) != drawn(server, **body)


def test_beams_and_marks(server: httpx.Client) -> None:
    greedy = drawn(server, temperature=0.0)
    beams = server.post(
        "/v1/completions",
        json={"prompt": "Say", "max_tokens": 6, "use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 2.0},
    ).json()
    assert len({choice["text"] for choice in beams["choices"]}) == 2 and greedy
    marked = {"inputs": "Say", "parameters": {"max_new_tokens": 24, "seed": 4, "watermark": True}}
    plain = marked | {"parameters": {"max_new_tokens": 24, "seed": 4, "do_sample": True}}
    texts = [server.post("/generate", json=body).json()["generated_text"] for body in (marked, plain)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: str(each.name))
def test_a_sampler_that_is_not_here_is_refused_with_the_reason(server: httpx.Client, sampler: CompatSampler) -> None:
    rows = [BY_NAME[name] for name in sampler.fields]
    here = [row for row in rows if row.here]
    assert bool(here) == (not sampler_meaning(sampler).startswith("bridle refuses")), "partly here is two rows"
    assert not here or len(here) == len(rows), "partly here is two rows"
    for row in rows:
        if row.here or row.is_neutral:
            continue
        answer = server.post("/v1/completions", json=BODY | {row.name: row.example})
        assert answer.status_code == 400 and row.why in answer.json()["error"]["message"], row
        assert row.why in sampler_meaning(sampler)


def test_every_sampler_has_a_row() -> None:
    named = {name for sampler in SAMPLERS for name in sampler.fields}
    here = {row.here for name in named for row in [BY_NAME[name]] if row.here}
    ours = {each.name for each in fields(SamplingParams)} & meanings().keys()
    internal = {name for name in ours if name.endswith("_ids") and name != "allowed_token_ids"}
    of_reports = {"logprobs_mode", "prompt_logprobs_start", "bias_texts"}
    assert ours - internal - of_reports - NO_SAMPLERS <= here
    absent = {row.name for row in FIELDS if "no such sampler" in row.why}
    assert absent <= named


def test_a_sampler_is_ascribed_to_those_who_have_it() -> None:
    for sampler in SAMPLERS:
        having = {system for row in FIELDS for system in row.systems if row.name in sampler.fields}
        assert set(sampler.systems) <= having, sampler


@pytest.mark.parametrize("file", NAMES, ids=lambda file: str(file.stem))
def test_no_field_and_no_route_is_missing(file: Path) -> None:
    listed = tomllib.loads(file.read_text(encoding="utf-8"))
    system = listed["system"]
    rows = {row.name for row in FIELDS if system in row.systems}
    assert not [name for name in names(listed, "fields") if name not in rows]
    told = {route.path for route in ROUTES if system in route.systems}
    assert set(names(listed, "routes")) <= told
    words = [name for word in WORDS if word.system == system for name in word.name.split(", ")]
    assert sorted(name for name in words if " " not in name) == sorted(names(listed, "words"))


@pytest.mark.parametrize("file", NAMES, ids=lambda file: str(file.stem))
def test_no_route_is_made_up(file: Path) -> None:
    listed = tomllib.loads(file.read_text(encoding="utf-8"))
    told = {route.path for route in ROUTES if listed["system"] in route.systems}
    assert told - {"/metrics", "/v1/classify"} <= set(names(listed, "routes"))


@pytest.mark.parametrize("system", ["guidance", "outlines"])
def test_what_clients_of_libraries_send_is_taken(system: System) -> None:
    fields = {name: text for text, names in sent(system).items() for name in names}
    assert len(fields) >= 8 and not [name for name, text in fields.items() if text.startswith("bridle refuses")]


def test_routes_are_the_same_where_they_are_here() -> None:
    known = {template(path) for path in paths()}
    for route in ROUTES:
        assert (template(route.path) in known) == (not route.why), route


def test_a_body_that_the_path_has_elsewhere_is_refused_with_where_it_goes(server: httpx.Client) -> None:
    """vLLM's demo server takes `prompt` on /generate. The error names the right route."""
    assert [route.but for route in ROUTES if route.but] == [
        "but with the bodies of SGLang and TGI; vLLM's `prompt` is for /v1/completions"
    ]
    answer = server.post("/generate", json={"prompt": "Say", "max_tokens": 3})
    assert answer.status_code == 422
    assert "only on /v1/completions; /generate has `inputs` or `text`" in answer.json()["error"]


@pytest.mark.parametrize(("name", "limits"), [("temperature", (0, 100)), ("presence_penalty", (-100, 100))])
def test_limits_wider_than_openais_are_those_of_the_page(
    server: httpx.Client, name: str, limits: tuple[int, int]
) -> None:
    """A value beyond OpenAI's limit is accepted. A value beyond the limit on bridle's page is refused with an error
    that names the field."""
    assert str(limits[1]) in next(row.why for row in FIELDS if row.name == name and "OpenAI" in row.systems)
    assert drawn(server) != drawn(server, **{name: 9.0})
    for value in limits:
        assert len(drawn(server, **{name: value})) == 24
    for value in (limits[0] - 1, limits[1] + 1):
        answer = server.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], name: value})
        assert answer.status_code == 400
        assert f"at least {limits[0]} and at most {limits[1]}" in answer.json()["error"]["message"]


def template(path: str) -> str:
    """Return a route's path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}|:[a-z_]+", "{}", path)
