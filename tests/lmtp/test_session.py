"""Tests of the state machine of a connection: each stream ends exactly once, for all events in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bridle.errors import EngineClosed, InternalError
from bridle.lmtp.messages import EventMessage, Failure, Generate, Msg, Token
from bridle.lmtp.session import (
    Action,
    DefineBuffer,
    Describe,
    Reattach,
    Send,
    Session,
    SessionState,
    Start,
    StopStream,
    Stream,
    StreamState,
)

GENERATE = 'GENERATE {"model": "m", "prompt": [1], "stream_id": 1}'


def token(stream: Stream, finish: str | None = None, branch: int = 0) -> Token:
    return Token(stream_id=stream.id, token=5, finish_reason=finish, branch=branch)


def opened(session: Session, line: str = GENERATE) -> Stream:
    (action,) = session.receive_line(line)
    assert isinstance(action, Start)
    return action.stream


def errors(actions: list[Action]) -> list[tuple[Any, str]]:
    """Return the stream id and error code of each failure in a list of actions."""
    sent = [action.answer for action in actions if isinstance(action, Send)]
    return [(answer.stream_id, answer.code) for answer in sent if isinstance(answer, Failure)]


def test_a_stream_from_begin_to_end() -> None:
    session = Session()
    stream = opened(session)
    assert stream.state is StreamState.OPENING
    assert session.put(stream, token(stream))
    assert stream.state is StreamState.RUNNING
    assert session.put(stream, token(stream, "stop"))
    assert stream.state is StreamState.ENDED
    assert session.num_streams == 0
    assert not session.put(stream, token(stream))
    assert session.fail(stream, EngineClosed("late")) == []


def test_each_request_is_its_action() -> None:
    session = Session()
    (score,) = session.receive_line('SCORE {"model": "m", "prompt": [], "scored": [1], "stream_id": "a"}')
    (info,) = session.receive_line('MODEL_INFO {"model": "m", "stream_id": 2}')
    (resume,) = session.receive_line('RESUME {"key": "k", "stream_id": 3}')
    (keep,) = session.receive_line('BUFFER {"model": "m", "name": "b", "prompt": [1], "stream_id": 4}')
    assert [type(action) for action in (score, info, resume, keep)] == [Start, Describe, Reattach, DefineBuffer]
    assert not session.is_extended
    session.receive_line('MODEL_INFO {"model": "m", "stream_id": 2, "data": {"lmtp": {"version": 1}}}')
    assert session.is_extended


def test_an_id_in_use_ends_both_requests_with_one_error() -> None:
    session = Session()
    stream = opened(session)
    stop, send = session.receive_line(GENERATE)
    assert stop == StopStream(stream)
    assert errors([send]) == [(1, "protocol_error")]
    assert session.num_streams == 0
    assert opened(session) is not stream


def test_a_bad_request_on_an_open_id_ends_it_too() -> None:
    session = Session()
    stream = opened(session)
    stop, send = session.receive_line('GENERATE {"model": "m", "stream_id": 1}')
    assert stop == StopStream(stream)
    assert errors([send]) == [(1, "invalid_request")]


def test_a_cancelled_stream_ends_once() -> None:
    session = Session()
    stream = opened(session)
    assert errors(session.receive_line('CANCEL {"stream_id": 1}')) == [(1, "cancelled")]
    assert not stream.is_open
    assert session.receive_line('CANCEL {"stream_id": 1}') == []


@pytest.mark.parametrize(
    ("line", "kind", "stream_id"),
    [
        ("PING", Msg, None),
        ('FOO {"stream_id": 9}', Msg, 9),
        ('GENERATE {"model": "m", "prompt": [1]}', Msg, None),
        ('GENERATE {"model": "m", "stream_id": 3}', Failure, 3),
        ('SCORE {"model": "m", "prompt": [1], "stream_id": 5}', Failure, 5),
        ('MODEL_INFO {"stream_id": 5}', Msg, 5),
    ],
)
def test_refusals_come_where_clients_wait(line: str, kind: type, stream_id: Any) -> None:
    (send,) = Session().receive_line(line)
    assert isinstance(send, Send)
    assert isinstance(send.answer, kind)
    assert send.answer.stream_id == stream_id
    if line.startswith("MODEL_INFO"):  # the original client looks for it, whatever else is there
        assert isinstance(send.answer, Msg) and send.answer.model_info == "<unavailable>"


def test_one_stream_too_many_is_refused() -> None:
    session = Session(max_streams=1)
    opened(session)
    assert errors(session.receive_line(GENERATE.replace("1}", "2}"))) == [(2, "overloaded")]


def test_branches_end_one_by_one() -> None:
    session = Session()
    stream = opened(session)
    assert session.put(stream, EventMessage(event="fork", stream_id=1, data={"branch": 1}))
    assert session.put(stream, token(stream, "stop"))
    assert stream.is_open
    assert session.put(stream, token(stream, "length", 1))
    assert not stream.is_open


def test_draining_refuses_and_finishes() -> None:
    session = Session()
    stream = opened(session)
    assert session.drain(5.0) == []  # a client of the original protocol is told nothing
    assert errors(session.receive_line(GENERATE.replace("1}", "2}"))) == [(2, "engine_closed")]
    assert session.put(stream, token(stream))
    assert errors(session.fail_all(EngineClosed("over"))) == [(1, "engine_closed")]
    extended = Session()
    extended.receive_line('MODEL_INFO {"model": "m", "stream_id": 2, "data": {"lmtp": {}}}')
    (notice,) = extended.drain(5.0)
    assert notice == Send(EventMessage(event="draining", data={"seconds": 5.0}))
    assert extended.drain(5.0) == []


def test_close_stops_everything_silently() -> None:
    session = Session()
    stream = opened(session)
    assert session.close() == [StopStream(stream, is_lost=True)]
    assert session.close() == session.receive_line(GENERATE) == []
    assert not session.put(stream, token(stream))


def test_wrong_steps_are_bugs() -> None:
    stream = Stream(1, StreamState.ENDED)
    with pytest.raises(InternalError, match="cannot change from state ended to state running"):
        stream.enter(StreamState.RUNNING)
    session = Session()
    session.close()
    with pytest.raises(InternalError, match="cannot change from state closed to state draining"):
        session._enter(SessionState.DRAINING)


class Conversation(RuleBasedStateMachine):
    """A client, workers and a server that act at random times. The log of sent messages must follow the protocol."""

    @initialize()
    def begin(self) -> None:
        self.session = Session(max_streams=3)
        self.asked: list[Stream] = []
        self.running: set[Stream] = set()
        self.ends: dict[int, int] = {}
        self.requests: dict[int, int] = {}

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(stream):
                    self.asked.append(stream)
                    self.running.add(stream)
                case StopStream(stream):
                    self.running.discard(stream)
                case Send(answer) if isinstance(answer, Failure):
                    self.ends[int(answer.stream_id)] = self.ends.get(int(answer.stream_id), 0) + 1

    @rule(stream_id=st.integers(0, 3), good=st.booleans())
    def generate(self, stream_id: int, good: bool) -> None:
        is_open = self.session.state is not SessionState.CLOSED
        in_use = any(stream.id == stream_id and stream.is_open for stream in self.asked)
        prompt = ', "prompt": [1]' if good else ""
        self.act(self.session.receive_line(f'GENERATE {{"model": "m"{prompt}, "stream_id": {stream_id}}}'))
        if is_open and not in_use:  # a repeated id shares the end of the first
            self.requests[stream_id] = self.requests.get(stream_id, 0) + 1

    @rule(stream_id=st.integers(0, 3))
    def cancel(self, stream_id: int) -> None:
        self.act(self.session.receive_line(f'CANCEL {{"stream_id": {stream_id}}}'))

    @rule(data=st.data(), finish=st.sampled_from([None, "stop"]))
    def answer(self, data: Any, finish: str | None) -> None:
        if self.asked:
            stream = data.draw(st.sampled_from(self.asked))
            if self.session.put(stream, token(stream, finish)):
                assert stream in self.running
                if finish:
                    self.running.discard(stream)
                    self.ends[stream.id] = self.ends.get(stream.id, 0) + 1

    @rule()
    def drain(self) -> None:
        self.act(self.session.drain(1.0))

    @rule()
    def fail_all(self) -> None:
        self.act(self.session.fail_all(EngineClosed("over")))

    @rule()
    def close(self) -> None:
        open_streams = [stream for stream in self.asked if stream.is_open]
        self.act(self.session.close())
        for stream in open_streams:  # nobody is left to be told
            self.ends[stream.id] = self.ends.get(stream.id, 0) + 1

    @invariant()
    def every_request_ends_once(self) -> None:
        pending = dict.fromkeys(self.requests, 0)
        for stream in self.asked:
            pending[int(stream.id)] += stream.is_open
        assert {key: self.ends.get(key, 0) + pending[key] for key in pending} == self.requests

    @invariant()
    def what_runs_is_open(self) -> None:
        assert self.running == {stream for stream in self.asked if stream.is_open}
        assert self.session.num_streams == len(self.running) <= 3


TestConversation = Conversation.TestCase


def test_generate_keeps_its_fields() -> None:
    (action,) = Session().receive_line('GENERATE {"model": "m", "prompt": "hi", "stream_id": 1, "top_p": 0.5}')
    assert isinstance(action, Start)
    assert action.request == Generate(stream_id=1, model="m", prompt="hi", options={"top_p": 0.5})
