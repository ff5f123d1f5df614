"""Traces of requests as files, texts and tables.

    output = llm.generate("Once", trace=True)[0]
    write([output.trace], "once.jsonl")
    for trace in read("once.jsonl"):
        print(rebuild(trace)[0].text)

The records of a trace are in `records.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.deprecated_names import old_names
from bridle.traces.format import (
    MAX_LINE_BYTES,
    decode_record,
    encode_record,
    encode_trace,
    header_of,
    parse,
    read,
    read_records,
    schema,
    write,
)
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
from bridle.traces.replay_text import Rebuilt, rebuild

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

if not TYPE_CHECKING:  # to a type checker, a name that is gone is an error
    __getattr__ = old_names(__name__)
