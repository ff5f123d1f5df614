"""Tests of `docs/lmtp.md` against the code."""

from __future__ import annotations

import json
import re

import pytest

from bridle.lmtp.decoding import decode_request
from bridle.lmtp.messages import FEATURES, Generate, Rejected
from bridle.lmtp.server import LmtpSettings
from bridle.lmtp.server.requests import OPTIONS
from bridle.lmtp.session import Session
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "lmtp.md").read_text(encoding="utf-8")
SAMPLING = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")  # where the page sends its readers
SHOWN = re.findall(
    r"^(?:`)?((?:GENERATE|SCORE|MODEL_INFO|CANCEL|RESUME|BUFFER|TOOL_RESULT) \{.*?\})(?:`|$)", PAGE, re.MULTILINE
)


@pytest.mark.parametrize("message", SHOWN)
def test_messages_on_the_page_are_read(message: str) -> None:
    request = decode_request(message)
    assert not isinstance(request, Rejected), request
    if isinstance(request, Generate):
        assert not request.options


def test_there_are_messages_of_every_type() -> None:
    kinds = {"GENERATE", "MODEL_INFO", "CANCEL", "RESUME", "BUFFER", "TOOL_RESULT"}
    assert {message.partition(" ")[0] for message in SHOWN} >= kinds


def test_the_page_has_all_features_and_fields() -> None:
    (shown,) = re.findall(r'"model": "demo", \.\.\., "lmtp": (\{.*?\})', PAGE)
    assert json.loads(shown) == FEATURES
    assert all(f"`{name}`" in PAGE or f"`{name}`" in SAMPLING for name in OPTIONS)


def test_the_page_has_the_limits_of_the_code() -> None:
    settings = LmtpSettings()
    assert f"at most {settings.max_buffers} buffers" in PAGE
    kept = f"at most {settings.max_detached} streams, with at most {settings.max_replay_size:,} tokens in total"
    assert kept in PAGE.replace("\n", " ")
    assert Session()._max_streams == settings.max_streams
