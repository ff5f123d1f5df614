"""Tests of traces as JSON lines: written traces can be read, lines match the schema, and invalid lines are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle import traces
from bridle.errors import InvalidRequest
from bridle.traces import (
    KINDS,
    VERSION,
    PromptRecord,
    Record,
    TokenRecord,
    Trace,
    TraceHeader,
    decode_record,
    encode_record,
    encode_trace,
    read,
    write,
)
from bridle.traces.format import plain_record
from tests.traces.records import HEADERS, RECORDS

SCHEMA = jsonschema.Draft202012Validator(traces.schema())
SHIPPED = Path(traces.__file__).with_name("schema.json")


@given(RECORDS | HEADERS)
def test_a_record_that_was_written_is_read(record: Record | TraceHeader) -> None:
    line = encode_record(record)
    assert b"\n" not in line
    assert decode_record(line) == record
    SCHEMA.validate(json.loads(line))
    assert json.loads(json.dumps(plain_record(record))) == json.loads(line)


@given(st.lists(st.builds(Trace, HEADERS, st.lists(RECORDS, max_size=4)), min_size=1, max_size=3))
def test_a_file_holds_traces_one_after_the_other(tmp_path_factory: pytest.TempPathFactory, made: list[Trace]) -> None:
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write(made, path)
    assert list(read(path)) == made
    assert path.read_bytes() == b"".join(map(encode_trace, made))


def test_the_shipped_schema_is_that_of_the_classes() -> None:
    assert json.loads(SHIPPED.read_text("utf-8")) == traces.schema()


def test_the_schema_refuses_what_is_no_record() -> None:
    for wrong in ({"type": "token"}, {"type": "tokens", "output": 0, "step": 1}, {"type": "header", "request_id": "a"}):
        with pytest.raises(jsonschema.ValidationError):
            SCHEMA.validate(wrong)


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len(set(KINDS.values())) == len(KINDS)
    assert set(KINDS.values()) == set(Record.__subclasses__()) & set(KINDS.values())
    assert plain_record(PromptRecord(0, 1))["type"] == "prompt"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "the file holds no trace"),
        ([b"{"], "line 1: not a trace record"),
        ([b'{"type":"wish","output":0,"step":1}'], "line 1: not a trace record"),
        ([encode_record(TokenRecord(0, 1))], "line 1 must be the header of the trace, but is a record"),
        ([encode_record(TraceHeader("a")), b"[]"], "line 2: not a trace record"),
        (
            [encode_record(replace(TraceHeader("a"), version=VERSION + 1))],
            f"has version {VERSION + 1}; this bridle reads",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, lines: Sequence[bytes], why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(InvalidRequest, match=why):
        list(read(path))


def test_a_line_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.traces.format.MAX_LINE_BYTES", 40)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode_record(TraceHeader("a" * 50)))
    with pytest.raises(InvalidRequest, match="line 1 has more than 40 bytes"):
        list(read(path))


def test_defaults_are_left_out() -> None:
    kept: dict[str, Any] = json.loads(encode_record(TokenRecord(0, 3, 1, 17, "a", "a")))
    assert kept == {"type": "token", "output": 0, "step": 3, "at": 1, "token": 17, "text": "a", "spelled": "a"}
