"""Tests of tools with replicas: controllers run in the replicas, tools run in the router's process, and no call is made
twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bridle.controller_tools import CALL_VARIABLE, ToolExecutor, ToolLimits
from bridle.controllers import Controller, SequenceView
from bridle.controllers.composition import compose
from bridle.controllers.plugins import make_demanded
from bridle.distributed import replica_tools
from bridle.distributed.replica_tools import check_limits
from bridle.engine.control.decision import Decision
from bridle.errors import InvalidRequest
from bridle.outputs import FinishReason
from tests.distributed.replica_kit import replicated
from tests.distributed.tools_kit import Tools, asks, desk_of, tools, written
from tests.engine.support import Replay, make_request, replay
from tests.waiting import PATIENCE, until

__all__ = ["tools"]  # a fixture


class Draws(Controller):
    """A controller that only samples."""

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample()


def read(stream: Any) -> Replay:
    (got,) = replay([event for events in stream for event in events]).values()
    return got


def test_controllers_of_replicas_call_tools_of_the_router(tools: Tools) -> None:
    desk = desk_of(tools)
    with replicated(tools=desk) as made:
        streams = [
            made.client.submit(
                make_request((1, 2, number), controller=asks(("count", {"key": f"k{number}"}), ("none", {})))
            )
            for number in range(12)
        ]
        for number, stream in enumerate(streams):
            output = read(stream).outputs[0]
            assert output.tokens[:3] == written(f"k{number}1")[:3]
            assert output.finished is not None and output.finished.stop == "answered"
            assert "unknown tool; available tools: count, waits, hangs" in output.logs
        assert desk.counts()["count"].num_calls == 12
        assert sum(replica.engine.statistics().num_requests for replica in made.replicas) == 12
    desk.close()


def test_a_lost_replicas_calls_are_not_made_again(tools: Tools) -> None:
    """Calls that have a result get the same result again, and a running call continues."""
    desk = desk_of(tools)
    with replicated(tools=desk) as made:
        controller = asks(
            ("count", {"key": "a"}), ("count", {"key": "a"}), ("waits", {"key": "b"}), ("count", {"key": "c"})
        )
        stream = made.client.submit(make_request(controller=controller))
        assert tools.is_reached.wait(PATIENCE)
        (busy,) = [n for n, replica in enumerate(made.replicas) if replica.engine.statistics().num_requests]
        made.replicas[busy].cut()
        until(lambda: made.client.num_losses == 1)
        until(lambda: made.replicas[1 - busy].engine.statistics().num_requests == 1)
        tools.is_open.set()
        output = read(stream).outputs[0]
        assert output.tokens == written("a1a2b1c1")
        assert output.logs == "a1\na2\nb1\nc1\n"
        assert tools.num == {"a": 2, "b": 1, "c": 1}
        assert desk.counts()["count"].num_calls == 3
    desk.close()


def test_what_is_kept_of_answers_is_bounded(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an output's results exceed the limit, the output ends when its replica is lost, and no tool is called
    again."""
    monkeypatch.setattr(replica_tools, "MAX_KEPT", 3)
    desk = desk_of(tools)
    with replicated(tools=desk) as made:
        controller = asks(("count", {"key": "a"}), ("count", {"key": "b"}), ("waits", {"key": "c"}))
        stream = made.client.submit(make_request(controller=controller))
        assert tools.is_reached.wait(PATIENCE)
        (busy,) = [n for n, replica in enumerate(made.replicas) if replica.engine.statistics().num_requests]
        made.replicas[busy].cut()
        finished = read(stream).outputs[0].finished
        assert finished is not None and "cannot begin again" in str(finished.error)
        assert tools.num == {"a": 1, "b": 1, "c": 1}
        assert made.client.calls.num_kept == 0
    desk.close()


def test_a_client_that_leaves_cancels_its_calls(tools: Tools) -> None:
    desk = desk_of(tools)
    with replicated(tools=desk) as made:
        stream = made.client.submit(make_request(controller=asks(("hangs", {}))))
        assert tools.is_reached.wait(PATIENCE)
        stream.cancel()
        assert tools.was_cancelled.wait(PATIENCE)
        assert read(stream).outputs[0].reason is FinishReason.CANCELLED
        until(lambda: desk.counts()["hangs"].num_running == 0)
        assert not made.client.calls.books
        assert not made.client.calls.asked
    desk.close()


def test_a_request_uses_what_it_may_within_the_limits(tools: Tools) -> None:
    desk = desk_of(tools, max_calls=3, max_argument_bytes=40, max_result_bytes=8)
    calls = [
        ("count", {"key": "ab"}),
        ("count", {"key": "x" * 60}),
        ("count", {"key": "1234567890"}),
        ("count", {"key": "e"}),
    ]
    with replicated(tools=desk) as made:
        logs = read(made.client.submit(make_request(controller=asks(*calls)))).outputs[0].logs.splitlines()
        assert logs[0] == "ab1"
        assert "at most 40 (max_argument_bytes)" in logs[1]
        assert "more than 8 bytes (max_result_bytes)" in logs[2]
        assert "at most 3 (max_calls)" in logs[3]
        granted = make_request(controller=asks(("count", {"key": "q"})), tools=("waits",))
        assert "the request has no such tool; its tools are waits" in read(made.client.submit(granted)).outputs[0].logs
        late = make_request(controller=asks(("count", {"key": "q"}, 10_000.0), ("hangs", {}, 0.01)))
        said = read(made.client.submit(late)).outputs[0].logs
        assert "timeout is 10000.0; must be" in said and "did not answer within 0.01 seconds" in said
    desk.close()


def test_parts_of_a_composition_call_for_themselves(tools: Tools) -> None:
    desk = desk_of(tools)
    with replicated(tools=desk) as made:
        controller = compose(asks(("count", {"key": "a"})), make_demanded(f"{__name__}:Draws", None))
        output = read(made.client.submit(make_request(controller=controller))).outputs[0]
        assert output.tokens == written("a1")
        assert tools.num == {"a": 1}
    desk.close()


def test_a_client_answers_through_the_router_also_after_a_loss() -> None:
    desk = ToolExecutor()
    with replicated(tools=desk) as made:
        request = make_request(controller=asks(("ask", {"what": "?"})), client_tools=("ask",), tenant="ann")
        stream = made.client.submit(request)
        until(lambda: bool(desk.asked_of("ann")))
        ((first, notice),) = desk.asked_of("ann")
        assert msgspec.json.decode(notice) == {"name": "ask", "arguments": {"what": "?"}}
        (busy,) = [n for n, replica in enumerate(made.replicas) if replica.engine.statistics().num_requests]
        made.replicas[busy].cut()
        until(lambda: desk.asked_of("ann")[0][0] != first)
        assert not desk.asked_of("bob")
        desk.answer(first, "ann", "yes")  # as its stream has told it
        got = read(stream)
        assert got.outputs[0].tokens == written("yes")
        told = [name for name, _ in got.outputs[0].stored]
        assert told[0].startswith(CALL_VARIABLE) and len(told) == 1
    desk.close()


def test_without_a_router_calls_end(tools: Tools) -> None:
    from bridle.distributed.remote_tools import RemoteToolExecutor
    from bridle.distributed.tool_messages import ToolMessage, ToolsElsewhere

    desk, sent = RemoteToolExecutor(ToolsElsewhere(("count",))), list[ToolMessage]()
    assert desk.begin("count").error == "the router has disconnected"
    desk.connect(sent.append)
    calls = [desk.begin("count"), desk.begin("count")]
    calls[0].cancel()
    assert [type(message).__name__ for message in sent] == ["ToolAsked", "ToolAsked", "ToolGivenUp"]
    desk.disconnect()
    assert calls[1].error == "the router has disconnected"
    assert len(sent) == 3


def test_limits_beyond_a_message_are_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="max_result_bytes is 104857600; with replicas it must be at most 33554432"
    ):
        check_limits(ToolLimits(max_result_bytes=100 << 20))
