"""Tests that values of `generation_config.json` apply to omitted fields only."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.http.openai.schemas import ChatBody, CompletionBody
from bridle.sampling import SamplingParams
from bridle.serving.requests.sampling_defaults import filled, limited, read_defaults
from tests.serving.fakes import fake_model

MESSAGES = [{"role": "user", "content": "x"}]


def folder(at: Path, **content: object) -> Path:
    (at / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return at


def test_it_is_read_by_the_names_of_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = folder(tmp_path, do_sample=True, temperature=0.6, top_k=20, max_new_tokens=99, top_p=1.0, eos_token_id=3)
    assert read_defaults(made) == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert "temperature 0.6, top_k 20, max_tokens 99" in caplog.text and "--generation-config none" in caplog.text
    assert read_defaults(made, "none") == {}
    assert read_defaults(tmp_path / "nowhere") == {}


def test_what_no_request_could_have_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_defaults(folder(tmp_path, temperature="hot", top_p=7, min_p=0.1)) == {"min_p": 0.1}
    assert "temperature is 'hot'" in caplog.text and "top_p is 7" in caplog.text


def test_a_requests_own_fields_win() -> None:
    model = replace(fake_model(), defaults={"temperature": 0.25, "top_k": 20, "max_tokens": 7})
    chat = ChatBody.model_validate({"messages": MESSAGES, "temperature": 1.0})
    found = chat.filled(chat.sampling(max_tokens=None), model)
    assert (found.temperature, found.top_k, found.max_tokens) == (1.0, 20, None)
    told = ChatBody.model_validate({"messages": MESSAGES, "top_k": 0})
    found = told.filled(told.sampling(max_tokens=3), model)
    assert (found.temperature, found.top_k, found.max_tokens) == (0.25, 0, 3)
    completion = CompletionBody.model_validate({"prompt": "x"})
    assert completion.filled(completion.sampling(max_tokens=16), model).max_tokens == 16


def test_a_length_fits_the_room_that_there_is() -> None:
    unset = SamplingParams(max_tokens=None)
    assert filled(unset, {"max_tokens": 50}, ()).max_tokens is None
    assert limited(unset, 50, 90).max_tokens == 50
    assert limited(unset, 50, 20).max_tokens == 20
    assert limited(unset, 50, 0).max_tokens == 1
    assert limited(unset.with_(min_tokens=60), 50, 90).max_tokens == 60
    assert limited(unset, None, 90).max_tokens is None
    assert limited(SamplingParams(max_tokens=70), 50, 90).max_tokens == 70
