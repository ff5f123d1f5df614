"""Tests of a request's record: the content of its log line, and the name of its kind of steering."""

from __future__ import annotations

from pathlib import Path

from bridle.controllers.reasoning_gate import ReasoningThenGrammar
from bridle.errors import InvalidRequest
from bridle.outputs import Finished, FinishReason, Forked, PromptEvent, Rewind, TokenEvent, Usage
from bridle.serving.lifecycle.request_record import MAX_MOMENTS, RequestRecord, names_of
from bridle.serving.requests.request_limits import RequestLimits
from bridle.serving.tenancy.keys import Identity
from bridle.structured_output import JsonSchema, Regex
from tests.engine.support import make_request


def token(number: int) -> TokenEvent:
    return TokenEvent("r", 0, number, "x")


class WasmController:
    """A fake controller with the interface of the real Wasm controller, which needs further packages."""

    module = "gh:microsoft/aici/pyctrl" + "x" * 200


def my_program(view: object) -> None:
    """A controller that is a function, for the name in the record."""


def test_what_steers_has_a_name() -> None:
    assert names_of(None) == (None, None)
    assert names_of(Regex("a+")) == (None, "regex")
    assert names_of(JsonSchema({"type": "object"})) == (None, "json_schema")
    name, constraint = names_of(WasmController())
    assert name is not None and name.startswith("gh:microsoft") and len(name) == 64 and constraint is None
    assert names_of(my_program) == ("my_program", None)
    assert names_of(ReasoningThenGrammar(end=1)) == ("free_part", None)


def test_the_story_of_a_request() -> None:
    story = RequestRecord(id="r", identity=Identity("ann", False), model="demo", terms=RequestLimits(-2))
    assert story.state == "coming in"
    story.submit(make_request([1, 2, 3], adapter="poems", controller=Regex("a")))
    assert story.state == "waiting"
    story.record_events([PromptEvent("r", 0, (1, 2, 3), queued=0.5, opening=0.25)])
    assert story.state == "prompt"
    story.record_events([token(1), token(2), Rewind("r", 0, 1, 1), Forked("r", 1, 0), token(3)])
    assert (story.state, story.num_tokens) == ("running", 2)
    story.record_events([Finished("r", 0, FinishReason.STOP, held=0.125)])
    story.usage, story.finish = Usage(3, 1, 2, 3, 0, 1), ["stop", "stop"]
    told = story.fields()
    want = {"user": "ann", "model": "demo", "adapter": "poems", "constraint": "regex", "priority": -2, "prompt": 3}
    want |= {"cached": 1, "completion": 2, "sampled": 3, "forced": 0, "rewound": 1, "controller_start_ms": 250.0}
    want |= {"queue_ms": 500.0, "controller_wait_ms": 125.0, "finish": "stop"}
    assert {name: told[name] for name in want} == want
    assert told["ms"] >= told["first_token_ms"] >= 0
    assert "controller" not in told and "trace" not in told and "shared" not in told


def test_a_refused_request_tells_why_and_no_more() -> None:
    story = RequestRecord(id="r", error=InvalidRequest("x" * 1000))
    told = story.fields()
    assert set(told) == {"ms", "error"} and len(told["error"]) == 300


def test_what_is_remembered_one_by_one_is_bounded() -> None:
    story = RequestRecord(id="r")
    story.record_events([Forked("r", number, 0) for number in range(10 * MAX_MOMENTS)])
    assert len(story.moments) == MAX_MOMENTS


def test_the_page_explains_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    story = RequestRecord(
        id="r", identity=Identity("ann", False), model="m", adapter="a", controller="c", constraint="r"
    )
    story.submitted = story.first_token = 1.0
    story.opening, story.held, story.finish, story.error = 1.0, 1.0, ["stop"], InvalidRequest("no")
    story.usage, story.span = Usage(shared_tokens=1, drafted_tokens=1, accepted_tokens=1, spared_tokens=1), FakeSpan()
    story.policies, story.dropped_blocks = ("p",), 1
    assert all(f"`{name}`" in page for name in story.fields())


class FakeSpan:
    """A fake span that has a trace id."""

    trace_id = "ab" * 16
    traceparent = ""

    def end(self, *args: object) -> None:
        raise AssertionError
