"""Priorities and deadlines over LMTP are those of every other front."""

from __future__ import annotations

import threading

import pytest

from bridle.lmtp.decoding import decode_request
from bridle.lmtp.encoding import encode_request
from bridle.lmtp.messages import Generate, Score
from tests.http.harness import overdue_model
from tests.lmtp.harness import running
from tests.waiting import PATIENCE


def test_they_travel() -> None:
    for request in (
        Generate(stream_id=1, model="m", prompt=(1,), priority=-3, deadline=2.5),
        Score(stream_id=1, model="m", prompt=(1,), scored=(2,), priority=4),
    ):
        assert decode_request(encode_request(request)) == request
    assert "priority" not in encode_request(Generate(stream_id=1, model="m", prompt=(1,)))


async def test_a_passed_deadline_ends_the_stream_and_frees_all() -> None:
    is_read = threading.Event()
    model = overdue_model(is_read, num_prompt=1)
    async with running(model) as setup:
        wire = setup.connect()
        await wire.hello()
        terms = {"max_tokens": 400, "ignore_eos": True, "deadline": 2 * PATIENCE}
        await wire.send("GENERATE", prompt=[1], stream_id=1, **terms)
        await wire.next()
        is_read.set()
        found = await wire.stream()
        assert found[-1]["code"] == "deadline_exceeded" and "deadline passed" in found[-1]["error"]
        await setup.settle()
        statistics = model.client.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 101}, "must be between -100"),
        ({"priority": "x"}, "must be an integer"),
        ({"priority": -1}, "user 'ann' may ask for 0 or more"),
        ({"deadline": 0}, "must be more than 0"),
        ({"deadline": "soon"}, "must be a number of seconds"),
    ],
)
async def test_what_is_not_allowed_is_refused(fields: dict[str, object], message: str) -> None:
    async with running() as setup:
        wire = setup.connect()
        for kind, rest in (("GENERATE", {}), ("SCORE", {"scored": [2]})):
            (refused,) = await wire.ask(kind, prompt=[1], **rest, **fields)
            assert message in refused["error"] and refused["code"] == "invalid_request"
        await setup.settle()


async def test_a_stream_has_a_line_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async with running() as setup:
        await setup.connect().ask("GENERATE", prompt=[1, 2], max_tokens=3, priority=2)
        await setup.settle()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "LMTP GENERATE" in line]
    for part in ("user=ann", "priority=2", "prompt=2", "sampled=3", "finish=length", "queue_ms="):
        assert part in line
