"""Traces of requests as files, texts and tables.

    output = llm.generate("Once", trace=True)[0]
    write([output.trace], "once.jsonl")
    for trace in read("once.jsonl"):
        print(rebuild(trace)[0].text)

The records of a trace are in `records.py`.
"""

from typing import TYPE_CHECKING

from bridle.deprecated_names import old_names
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
from bridle.traces.records import KINDS as KINDS
from bridle.traces.records import MAX_BIASES as MAX_BIASES
from bridle.traces.records import MAX_EXCHANGES_BYTES as MAX_EXCHANGES_BYTES
from bridle.traces.records import MAX_LIVE_RECORDS as MAX_LIVE_RECORDS
from bridle.traces.records import MAX_RECORDS as MAX_RECORDS
from bridle.traces.records import MAX_SAID as MAX_SAID
from bridle.traces.records import NUM_CANDIDATES as NUM_CANDIDATES
from bridle.traces.records import VERSION as VERSION
from bridle.traces.records import ChunkRecord as ChunkRecord
from bridle.traces.records import Cost as Cost
from bridle.traces.records import Draw as Draw
from bridle.traces.records import EndRecord as EndRecord
from bridle.traces.records import ExchangeRecord as ExchangeRecord
from bridle.traces.records import ForkRecord as ForkRecord
from bridle.traces.records import Later as Later
from bridle.traces.records import LogRecord as LogRecord
from bridle.traces.records import Odds as Odds
from bridle.traces.records import PromptRecord as PromptRecord
from bridle.traces.records import Record as Record
from bridle.traces.records import ReplacedRecord as ReplacedRecord
from bridle.traces.records import RewindRecord as RewindRecord
from bridle.traces.records import StoredRecord as StoredRecord
from bridle.traces.records import TokenRecord as TokenRecord
from bridle.traces.records import Trace as Trace
from bridle.traces.records import TraceHeader as TraceHeader
from bridle.traces.records import WaitRecord as WaitRecord
from bridle.traces.records import made as made
from bridle.traces.replay_text import Rebuilt as Rebuilt
from bridle.traces.replay_text import rebuild as rebuild

if not TYPE_CHECKING:  # to a type checker, a removed name is an error
    __getattr__ = old_names(__name__)
