"""Builds the events of a `/v1/run` stream: new text of each fork, and the usage so far.

Every `run` event lists all forks of the request, including finished forks. Text that was rolled back is not deleted; a
mark precedes the text that replaces it, as in AICI's original server. Token usage is also counted as in AICI's original
server. Each output counts one sampled token in each model step, plus the tokens that the model processed for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from bridle.errors import ControllerDeadlock
from bridle.outputs import Event, Finished, FinishReason, Forked, PromptEvent, Rewind, TokenEvent, Usage
from bridle.serving.lifecycle.generation import SubRequest
from bridle.serving.outputs.stream_extras import StreamExtras

_REASONS = {
    FinishReason.STOP: "eos",
    FinishReason.LENGTH: "length",
    FinishReason.CONTROLLER: "aici-stop",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "abort",
    FinishReason.ERROR: "fail",
}


@dataclass(slots=True)
class RunUsage:
    """Token usage of a run. `num_unfed` has the number of tokens that the next model step of each output will process.
    `forked` has the outputs that were forked and have not sampled since then; their tokens are already processed."""

    sampled_tokens: int = 0
    ff_tokens: int = 0
    num_unfed: dict[int, int] = field(default_factory=dict)
    forked: set[int] = field(default_factory=set)
    over: Usage = field(default_factory=Usage)  # usage of finished outputs

    def note(self, event: Event) -> None:
        """Count one event."""
        unfed = self.num_unfed
        match event:
            case PromptEvent():
                unfed[event.index] = unfed.get(event.index, 0) + len(event.tokens)
            case TokenEvent(forced=True):
                unfed[event.index] = unfed.get(event.index, 0) + 1
            case TokenEvent():
                self.sampled_tokens += 1
                self.ff_tokens += max(unfed.get(event.index, 0), event.index not in self.forked)
                self.forked.discard(event.index)
                unfed[event.index] = 1
            case Forked():
                self.ff_tokens += unfed.get(event.parent, 0)
                unfed[event.parent] = 0
                self.forked.add(event.parent)
            case Finished():
                self.over.add(event.usage)
            case Rewind():
                unfed[event.index] = max(unfed.get(event.index, 0) - event.num_tokens, 0)

    def shape(self) -> dict[str, Any]:
        """Return the `usage` object of an event."""
        cost = 2 * self.sampled_tokens + self.ff_tokens
        counts = {"sampled_tokens": self.sampled_tokens, "ff_tokens": self.ff_tokens, "cost": cost}
        return counts | self.over.predictions() | self.over.constraint_fields()


@dataclass(slots=True)
class _Fork:
    """The new content of one output for the next event. `reason` and `was_rewound` are kept for later events."""

    text: str = ""
    error: str = ""
    reason: str | None = None
    was_rewound: bool = False
    final_text: str | None = None  # sent once, at the end of an output that had text rolled back


class RunShaper:
    """Converts the engine's events of a request to `run` events."""

    def __init__(self, part: SubRequest) -> None:
        self._part = part
        self._usage = RunUsage()
        self._forks: dict[int, _Fork] = {0: _Fork()}

    def run_item(self, events: list[Event]) -> dict[str, Any]:
        """Return a `run` event that reports the engine's `events`."""
        for event in events:
            self._usage.note(event)
            self._note(event)
        for delta in self._part.reader.read():
            fork = self._forks.setdefault(delta.index, _Fork())
            fork.text += delta.text
            fork.was_rewound |= delta.taken_tokens > 0
            if delta.is_last and fork.was_rewound:
                fork.final_text = self._part.collector.growing[delta.index].output.text
        return {
            "object": "run",
            "forks": [self._shape(index) for index in sorted(self._forks)],
            "usage": self._usage.shape(),
        }

    def _note(self, event: Event) -> None:
        fork = self._forks.setdefault(event.index, _Fork())
        if isinstance(event, Finished):
            is_stuck = isinstance(event.error, ControllerDeadlock)
            fork.reason = "deadlock" if is_stuck else _REASONS[event.reason]
            if event.error is not None:
                fork.error = str(event.error)

    def _shape(self, index: int) -> dict[str, Any]:
        fork, note = self._forks[index], self._part.note(index) or StreamExtras()
        self._forks[index] = _Fork(reason=fork.reason, was_rewound=fork.was_rewound)
        if fork.error:
            note.log(f"{fork.error}\n" if note.logs.endswith("\n") or not note.logs else f"\n{fork.error}\n")
        shape: dict[str, Any] = {
            "index": index,
            "text": fork.text,
            "error": fork.error,
            "logs": note.logs,
            "storage": note.storage,
        }
        if note.records:
            shape["trace"] = note.trace
        if fork.reason is not None:
            shape["finish_reason"] = fork.reason
        if fork.final_text is not None:
            shape["final_text"] = fork.final_text
        return shape


def initial_run(run_id: str, model: str) -> dict[str, Any]:
    """Return the first event of a stream."""
    return {"id": f"run-{run_id}", "object": "initial-run", "created": int(time.time()), "model": model}
