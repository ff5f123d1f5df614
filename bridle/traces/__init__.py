"""Traces of requests as files, texts and tables.

    output = llm.generate("Once", trace=True)[0]
    write([output.trace], "once.jsonl")
    for trace in read("once.jsonl"):
        print(rebuild(trace)[0].text)

What a trace consists of is in `records.py`, which needs the standard library alone; the rest is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bridle.deprecated_names import old_names
from bridle.traces.records import (
    KINDS,
    MAX_BIASES,
    MAX_EXCHANGES_BYTES,
    MAX_LIVE_RECORDS,
    MAX_RECORDS,
    MAX_SAID,
    NUM_CANDIDATES,
    VERSION,
    ChunkRecord,
    Cost,
    Draw,
    EndRecord,
    ExchangeRecord,
    ForkRecord,
    Later,
    LogRecord,
    Odds,
    PromptRecord,
    Record,
    ReplacedRecord,
    RewindRecord,
    StoredRecord,
    TokenRecord,
    Trace,
    TraceHeader,
    WaitRecord,
    made,
)

if TYPE_CHECKING:
    from bridle.traces.format import MAX_LINE_BYTES as MAX_LINE_BYTES
    from bridle.traces.format import decode_record as decode_record
    from bridle.traces.format import encode_record as encode_record
    from bridle.traces.format import encode_trace as encode_trace
    from bridle.traces.format import header_of as header_of
    from bridle.traces.format import parse as parse
    from bridle.traces.format import read as read
    from bridle.traces.format import read_records as read_records
    from bridle.traces.format import schema as schema
    from bridle.traces.format import write as write
    from bridle.traces.replay_text import Rebuilt as Rebuilt
    from bridle.traces.replay_text import rebuild as rebuild

__all__ = [
    "ChunkRecord",
    "Cost",
    "Draw",
    "EndRecord",
    "ExchangeRecord",
    "ForkRecord",
    "TraceHeader",
    "KINDS",
    "Later",
    "LogRecord",
    "MAX_BIASES",
    "MAX_EXCHANGES_BYTES",
    "MAX_LINE_BYTES",
    "MAX_LIVE_RECORDS",
    "MAX_RECORDS",
    "MAX_SAID",
    "NUM_CANDIDATES",
    "Odds",
    "PromptRecord",
    "Rebuilt",
    "Record",
    "ReplacedRecord",
    "RewindRecord",
    "StoredRecord",
    "TokenRecord",
    "Trace",
    "VERSION",
    "WaitRecord",
    "decode_record",
    "encode_record",
    "encode_trace",
    "header_of",
    "made",
    "parse",
    "read",
    "read_records",
    "rebuild",
    "schema",
    "write",
]

_HOMES = {
    "bridle.traces.replay_text": (
        "Rebuilt",
        "rebuild",
    ),
    "bridle.traces.format": (
        "MAX_LINE_BYTES",
        "decode_record",
        "encode_record",
        "encode_trace",
        "header_of",
        "parse",
        "read",
        "read_records",
        "schema",
        "write",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def _load(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


if not TYPE_CHECKING:  # to a type checker, a name that is gone is an error
    __getattr__ = old_names(__name__, _load)
