"""Traces of requests as files, texts and tables.

    output = llm.generate("Once", trace=True)[0]
    write([output.trace], "once.jsonl")
    for trace in read("once.jsonl"):
        print(rebuild(trace)[0].text)

What a trace consists of is in `bridle.traced`.
"""

from __future__ import annotations

from bridle.traced.rebuild import Rebuilt, rebuild
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

__all__ = [
    "MAX_LINE_BYTES",
    "Rebuilt",
    "decode_record",
    "encode_record",
    "encode_trace",
    "header_of",
    "parse",
    "read",
    "read_records",
    "rebuild",
    "schema",
    "write",
]
