"""Tool calls of Wasm controllers. A guest calls a tool by setting a variable with a reserved name.

A guest sets `tool:ID` to `{"name": ..., "arguments": {...}, "timeout": seconds}`, with an ID of its own, and continues
or waits for `tool:ID:answer`. Once the call has ended, the engine sets that variable to the answer. After a failed
call, the engine first sets `tool:ID:error` to the reason, and then the answer to an empty value. Setting `tool:ID` to
an empty value cancels the call. Clients do not see the variables of tool calls. Tool calls belong to the request, like
its variables: any output of the request may wait for an answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bridle.controller_tools import Call, Desk, ToolCallContext, ToolExecutor, ToolSession
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import Answer, Ask, StoredValue

PREFIX, ANSWER, ERROR = "tool:", ":answer", ":error"

Values = tuple[tuple[str, bytes], ...]


class _Wanted(msgspec.Struct):
    """Tool call as a guest writes it."""

    name: str
    arguments: dict[str, Any] = {}
    timeout: float | None = None


_decoder = msgspec.json.Decoder(_Wanted)


@dataclass(slots=True)
class _Group:
    """The outputs of a request. `calls` are the calls whose answers the guests have not received yet, by variable."""

    caller: ToolSession
    num_outputs: int = 1
    calls: dict[str, Call] = field(default_factory=dict)


class ToolVariables:
    """Tracks guests' tool variables, on the engine's thread."""

    def __init__(self) -> None:
        self.desk: Desk = ToolExecutor()
        self._groups: dict[int, _Group] = {}
        self._awaited: dict[int, tuple[Call, ...]] = {}

    def inform(self, ask: Ask) -> Values:
        """Record the new output that an ask reports, if any. Returns the variables to set before the controller is
        asked."""
        if ask.request is not None:
            asked = ask.request
            behalf = ToolCallContext(asked.tenant, asked.client_tools, asked.id)
            self._groups[ask.seq_id] = _Group(ToolSession(self.desk, asked.tools, behalf))
        elif ask.parent is not None and ask.parent in self._groups:
            self._groups[ask.seq_id] = self._groups[ask.parent]
            self._groups[ask.seq_id].num_outputs += 1
        group = self._groups.get(ask.seq_id)
        if group is None or not group.calls:
            return ()
        done = [(name, call) for name, call in group.calls.items() if call.is_done]
        for name, _ in done:
            del group.calls[name]
        return tuple(value for name, call in done for value in _told(name, call))

    def note_answer(self, seq_id: int, answer: Answer) -> None:
        """Remove the tool calls from a guest's writes, and start them. If only calls can end the guest's wait, the
        decision becomes a wait for these calls."""
        self._awaited.pop(seq_id, None)
        group = self._groups.get(seq_id)
        if group is None:
            return
        if any(_is_call(value.name) for value in answer.stored):
            notices = [self._take(group, value) for value in answer.stored if _is_call(value.name)]
            kept = [value for value in answer.stored if not _is_call(value.name)]
            answer.stored = (*kept, *(StoredValue(*notice) for notice in notices if notice is not None))
        decision = answer.decision
        if decision is not None and decision.waits_for is not None:
            answer.decision = self._waiting(seq_id, group, decision)

    def _take(self, group: _Group, value: StoredValue) -> tuple[str, bytes] | None:
        """Start or cancel a tool call. Returns the message for the client, or None."""
        if value.name.endswith((ANSWER, ERROR)):
            return None  # a guest's own variable
        if value.name in group.calls:
            group.calls[value.name].cancel()  # its answer cannot be read any more
        if not value.value:
            return None
        try:
            wanted = _decoder.decode(value.value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            call = group.calls[value.name] = Call("?")
            call.end(error=f"malformed call: {error}")
            return None
        call = group.calls[value.name] = group.caller.call(wanted.name, wanted.arguments, wanted.timeout)
        return call.notice

    def _waiting(self, seq_id: int, group: _Group, decision: Decision) -> Decision:
        """Return the engine's decision for the guest's wait. A wait for a call ends by an outside event, so it is no
        deadlock."""
        if not group.calls:
            return decision
        names = [name for name, _ in decision.waits_for or ()]
        calls = tuple(call for name, call in group.calls.items() if name + ANSWER in names or name + ERROR in names)
        if not names and decision.is_wait:  # a guest that cannot name what it waits for
            calls = tuple(group.calls.values())
        if not calls:
            return Decision.wait()  # another output may continue once it is answered
        self._awaited[seq_id] = calls
        return Decision.wait_for(*calls)

    def holds(self, ask: Ask) -> bool:
        """Return whether the guest need not be asked: it waits for tool calls, none of them has ended, and nothing else
        has changed."""
        if ask.seq_id not in self._awaited or ask != Ask(ask.seq_id, turns=ask.turns):
            return False
        return not self.is_ready(ask.seq_id)

    def is_ready(self, seq_id: int) -> bool:
        """Return whether one of the calls that the output waits for has ended."""
        return any(call.is_done for call in self._awaited.get(seq_id, ()))

    def leave(self, seq_ids: Collection[int]) -> None:
        """Remove ended outputs. The calls of a request are cancelled with its last output."""
        for seq_id in seq_ids:
            self._awaited.pop(seq_id, None)
            group = self._groups.pop(seq_id, None)
            if group is None:
                continue
            group.num_outputs -= 1
            for call in () if group.num_outputs else group.calls.values():
                call.cancel()


def _is_call(name: str) -> bool:
    return name.startswith(PREFIX)


def _told(name: str, call: Call) -> Values:
    """Return the variables from which a guest reads the result of a call."""
    if call.error is None:
        return ((name + ANSWER, call.text.encode(errors="replace")),)
    return ((name + ERROR, call.error.encode(errors="replace")), (name + ANSWER, b""))
