"""Replays a recorded trace: every request goes to a new runtime, and the replies must equal the recorded ones.

The answers of each sequence are compared in order. Times and step numbers are not compared, because a controller that
was late in the trace may answer in time now, or the reverse. An answer that comes earlier than in the trace is kept
until its turn; meanwhile the engine does not ask about the sequence. A late answer is requested again. The input is a
trace that `recording` wrote, with one `bridle.traces.ExchangeRecord` for each exchange.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from bridle.aici.client.process import RuntimeConfig, RuntimeProcess
from bridle.errors import InvalidRequest, ProtocolError
from bridle.traces import EndRecord, ExchangeRecord, TraceHeader, read_records

#: Fields whose values differ between runs.
_VOLATILE = frozenset({"micros", "time", "updated_at", "compiled_size", "$rid", "num_masks"})
#: Seconds to wait for an answer that the record has, and seconds between two asks for it.
_PATIENCE, _PAUSE = 60.0, 0.005
#: The beginning of log lines with which the runtime reports that a controller is late.
_LATE = "\N{HOURGLASS WITH FLOWING SAND}"
_TIMEOUT = "timeout"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyDifference:
    """A reply that differs from the trace. `line` is the trace's line number, from 1."""

    line: int
    operation: str
    expected: Any
    got: Any


def replay(path: Path, config: RuntimeConfig, step_ms: int = 5_000) -> Iterator[ReplyDifference | None]:
    """Replay the traces of a file, each with a new runtime. Yields one item per exchange: the difference, or None if
    the reply is the same. A controller may compute for `step_ms` milliseconds in a step, so that a busy machine does
    not make it late. A controller that takes longer is ended. Raises `InvalidRequest` for a file that is not a trace of
    a runtime, and at the end of a truncated trace."""
    patient = ("--wasm-max-step-time", str(step_ms), "--wasm-max-timeout-steps", "1") if config.dialect == 2 else ()
    config = replace(config, extra_args=(*config.extra_args, *patient), trace=None)
    player: _Player | None = None
    with ExitStack() as started:
        for number, value in read_records(path):
            if isinstance(value, TraceHeader):
                _check(value, config, f"{path}: line {number}")
                started.close()
                player = _Player(_start(config, started))
            elif isinstance(value, ExchangeRecord):
                assert player is not None
                yield player.play(number, value)
            elif isinstance(value, EndRecord) and value.num_cut:
                raise InvalidRequest(
                    f"{path}: the last {value.num_cut} exchanges are missing, because the file was full", "TRACE"
                )


def _check(header: TraceHeader, config: RuntimeConfig, place: str) -> None:
    if header.runtime is None:
        raise InvalidRequest(
            f"{place} is the trace of an output, not of a control runtime; replay it with --model", "TRACE"
        )
    dialect = header.runtime.get("dialect")
    if dialect != config.dialect:
        raise InvalidRequest(
            f"{place}: the trace has exchanges of dialect {dialect}; this runtime speaks dialect {config.dialect}",
            "TRACE",
        )


def _start(config: RuntimeConfig, started: ExitStack) -> RuntimeProcess:
    process = RuntimeProcess(config)
    started.callback(process.close)
    started.callback(process.kill)
    return process


@dataclass(slots=True)
class _Said:
    """Output of a sequence up to its next answer, in the trace or in the replay; `answer` is None until the answer
    arrives."""

    logs: str = ""
    storage: list[Any] = field(default_factory=list)
    answer: Json | None = None

    def hear(self, result: Json) -> None:
        """Add the sequence's result of one step."""
        self.logs += "".join(line for line in str(result["logs"]).splitlines(True) if not line.startswith(_LATE))
        self.storage += result["storage"]
        if not _waits(result):
            self.answer = result

    def take(self) -> Json:
        """Return the answer with all output that preceded it, and clear both."""
        answer = {**(self.answer or {}), "logs": self.logs, "storage": self.storage}
        if _TIMEOUT in str(
            answer.get("error", "")
        ):  # the text has the waiting time and the guest's position, which vary
            answer |= {"error": _TIMEOUT, "logs": ""}
        self.logs, self.storage, self.answer = "", [], None
        return answer


class _Player:
    """Replays exchanges with a runtime process."""

    def __init__(self, process: RuntimeProcess) -> None:
        self._process = process
        self._recorded: dict[str, _Said] = {}
        self._now: dict[str, _Said] = {}

    def play(self, number: int, exchange: ExchangeRecord) -> ReplyDifference | None:
        """Replay one exchange. Returns the difference between the new reply and the recorded reply, or None."""
        request, reply = exchange.request, exchange.reply
        if not isinstance(request, dict) or not isinstance(reply, dict):
            raise InvalidRequest(
                f"line {number} of the trace is not an exchange: request and reply must be objects", "TRACE"
            )
        if request.get("op") == "mid_process" and "freed" in request and reply.get("type") == "ok":
            expected, got = self._step(number, request, reply)
        else:
            expected, got = reply, self._exchange(number, request, side=exchange.side)
        expected, got = _stable(expected), _stable(got)
        return None if got == expected else ReplyDifference(number, str(request.get("op")), expected, got)

    def _exchange(self, number: int, command: Json, *, side: bool = False) -> Json:
        channel = self._process.link.side if side else self._process.link.main
        channel.send(msgspec.json.encode(command), 10.0, self._process.is_alive)
        reply = channel.receive(self._process.config.start_timeout, self._process.is_alive)
        if reply is None:
            raise ProtocolError(f"the control runtime did not answer exchange {number} of the trace")
        data: Json = msgspec.json.decode(reply)
        return data

    # -- steps of dialect 2 ------------------------------------------------------------------------------

    def _step(self, number: int, command: Json, recorded: Json) -> tuple[Json, Json]:
        """Replay a step. Returns the recorded and the new reply, reduced to the answers that the trace has up to this
        step."""
        ops = [op for op in command["ops"] if self._of(self._now, op["id"]).answer is None]
        now = self._exchange(number, {**command, "ops": ops, "deadline_ms": None, "reply_ms": None})
        if now.get("type") != "ok":
            return recorded, now
        self._hear(self._recorded, recorded)
        self._hear(self._now, now)
        due = [key for key in recorded["data"]["seqs"] if self._of(self._recorded, key).answer is not None]
        for key in due:
            if int(key) not in command["freed"]:
                self._await(number, key)
        answers = [{key: self._of(run, key).take() for key in due} for run in (self._recorded, self._now)]
        for run in (self._recorded, self._now):
            for freed in command["freed"]:
                run.pop(str(freed), None)
        expected, got = ({**reply["data"], "seqs": seqs} for reply, seqs in zip((recorded, now), answers, strict=True))
        return {"data": expected}, {"data": got}

    def _await(self, number: int, key: str) -> None:
        """Ask the controller again until it gives the answer that the trace has in this step."""
        deadline = time.monotonic() + _PATIENCE
        op = {"id": int(key), "backtrack": 0, "tokens": [], "sampled": None}
        while self._of(self._now, key).answer is None and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            reply = self._exchange(number, {"op": "mid_process", "ops": [op], "freed": []})
            if reply.get("type") != "ok":
                return
            self._hear(self._now, reply)

    def _hear(self, run: dict[str, _Said], reply: Json) -> None:
        for key, result in reply["data"]["seqs"].items():
            self._of(run, key).hear(result)

    def _of(self, run: dict[str, _Said], key: str | int) -> _Said:
        return run.setdefault(str(key), _Said())


def _waits(result: Json) -> bool:
    """Return whether a result is no answer yet: the controller is late, or waits for a time or for a variable."""
    branches = (result.get("result") or {}).get("branches") or []
    return len(branches) == 1 and branches[0].get("wait") is True


def _stable(value: Any) -> Any:
    """Return the value without the parts that differ between runs. A mask is replaced by True."""
    if isinstance(value, dict):
        kept = {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
        if kept.get("sample_mask") is not None:
            kept["sample_mask"] = True
        return kept
    return [_stable(item) for item in value] if isinstance(value, list) else value
