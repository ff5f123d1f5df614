"""Traces of outputs over LMTP: a stream's records add up to its tokens, and the server stores the same trace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridle.lmtp.client import Client, MemoryCarrier
from bridle.lmtp.decoding import decode_request
from bridle.lmtp.encoding import encode_request
from bridle.lmtp.messages import EventMessage, Generate, Score
from bridle.serving.tenancy.keys import Identity
from bridle.traces import Trace, decode_record, parse
from bridle.traces.replay_text import rebuild, rebuild_records
from tests.lmtp.harness import Setup, running


def test_the_wish_for_a_trace_travels() -> None:
    for request in (
        Generate(stream_id=1, model="m", prompt=(1,), trace="events"),
        Score(stream_id=1, model="m", prompt=(1,), scored=(2,), trace=True),
    ):
        assert decode_request(encode_request(request)) == request
    assert "trace" not in encode_request(Generate(stream_id=1, model="m", prompt=(1,)))


async def kept(setup: Setup, request_id: str, user: str = "ann") -> Trace:
    await setup.settle()
    (trace,) = parse(await setup.host.traces.find(request_id, user))
    return trace


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("rewind", ["hold", "event"])
async def test_records_come_before_their_tokens(rewind: str, key: str | None) -> None:
    async with running() as setup:
        wire = setup.connect()
        await wire.hello()
        fields: dict[str, Any] = {"rewind": rewind} if key is None else {"rewind": rewind, "key": key}
        told = await wire.ask("GENERATE", prompt=[1, 2], max_tokens=5, seed=3, trace="events", **fields)
        first, *rest = told
        assert (first["event"], first["trace"]) == ("trace", "told")
        tokens, records = [], []
        for each in rest:
            if each.get("event") == "trace":
                assert each["branch"] == 0
                records += [decode_record(json.dumps(record).encode()) for record in each["records"]]
            elif "token" in each:
                tokens.append(each["token"])
                assert rebuild_records(records)[0].token_ids[: len(tokens)] == tokens
        trace = await kept(setup, first["id"])
        assert trace.records == records
        assert rebuild(trace)[0].token_ids == tokens
        assert (trace.header.model, len(tokens)) == (setup.model.name, 5)


async def test_a_trace_may_be_kept_alone() -> None:
    async with running() as setup:
        wire = setup.connect()
        first, *rest = await wire.ask("GENERATE", prompt=[1], max_tokens=2, trace=True)
        assert first["trace"] == "kept" and not any("event" in each for each in rest)
        assert len(rebuild(await kept(setup, first["id"]))[0].token_ids) == 2
        first, *_ = await wire.ask("SCORE", prompt=[1], scored=[2], trace=True)
        assert (await kept(setup, first["id"])).header.prompt == [1, 2]
        for nothing in (False, None, "off"):
            answers = await wire.ask("GENERATE", prompt=[1], max_tokens=2, trace=nothing)
            assert not any("event" in each for each in answers)


async def test_what_is_no_wish_is_refused() -> None:
    async with running() as setup:
        wire = setup.connect()
        for wrong in ("maybe", 3, ["events"]):
            (refused,) = await wire.ask("GENERATE", prompt=[1], trace=wrong)
            assert "must be true, false or 'events'" in refused["error"] and refused["param"] == "trace"


async def test_the_client_gets_records_among_the_items() -> None:
    async with running() as setup:
        ann = Identity("ann", False)
        client = Client(MemoryCarrier(lambda link: setup.server.serve(link, ann)), setup.model.name)
        stream = await client.generate([1, 2], max_tokens=3, trace="events")
        records, tokens = [], []
        async for item in stream.items():
            if isinstance(item, EventMessage):
                records += [decode_record(json.dumps(each).encode()) for each in item.data.get("records", ())]
            else:
                tokens.append(item.token)
        assert rebuild_records(records)[0].token_ids == tokens
        await client.close()
