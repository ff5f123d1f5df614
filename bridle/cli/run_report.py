"""The report of a run: collects texts, logs, variables, counts and times from the events of its stream. The report is
printed in the format of AICI's original client.

The module does not talk to a server; the caller passes the events.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridle.cli.terminal import say


@dataclass(slots=True)
class RunReport:
    """The report of a run in progress. Times are in seconds since the request was sent. `level` 1 prints only the
    texts, 3 also logs as they arrive, 5 every event."""

    request: dict[str, Any]
    level: int = 3
    clock: Callable[[], float] = time.monotonic
    response: list[Any] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    raw_storage: dict[str, str] = field(default_factory=dict)
    error: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    _began: float = 0.0
    _first_usage: dict[str, int] = field(default_factory=dict)
    _partial: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def note(self, moment: str) -> None:
        """Record the current time under the name `moment`, such as `first_token`. Only the first call for each name
        counts."""
        self.timing.setdefault(moment, self.clock() - self._began)

    def add(self, item: Any) -> None:
        """Add an event of the stream. `item` is None when the stream has ended."""
        if item is None:
            self._flush_logs()
            self._say(3, "[DONE]")
            return
        self._say(5, json.dumps(item, ensure_ascii=False))
        self.note("data0")
        self.response.append(item)
        for fork in item.get("forks", ()):
            self._add_fork(fork)
        if "usage" in item:
            self._count(item["usage"])

    def _add_fork(self, fork: dict[str, Any]) -> None:
        index = fork["index"]
        while len(self.text) <= index:
            self.text.append("")
            self.logs.append("")
        self.text[index] = fork.get("final_text", self.text[index] + fork["text"])
        self.logs[index] += fork["logs"]
        for command in fork.get("storage", ()):
            self._store(command.get("WriteVar") or {})
        if fork["logs"]:
            self._print_logs(index, fork["logs"])
        if fork.get("error"):
            self.error = self.error or fork["error"]

    def _store(self, write: dict[str, Any]) -> None:
        """Apply a write of a variable. A value with the operation `Append` is added to the old value."""
        if "name" in write:
            before = self.raw_storage.get(write["name"], "") if write.get("op") == "Append" else ""
            self.raw_storage[write["name"]] = before + write["value"]

    def _count(self, usage: dict[str, int]) -> None:
        if usage.get("sampled_tokens", 0) > self.usage.get("sampled_tokens", 0):
            self._first_usage = self._first_usage or usage
            self.note("first_token")
            self.timing["last_token"] = self.clock() - self._began
        self.usage = usage

    # -- derived values --------------------------------------------------------------------------------------

    @property
    def storage(self) -> dict[str, str]:
        """Return the variables of the run, decoded as text."""
        return {name: bytes.fromhex(value).decode("utf-8", "replace") for name, value in self.raw_storage.items()}

    @property
    def tps(self) -> dict[str, float]:
        """Return tokens per second: prompt tokens until the first token was sampled, and sampled tokens from then
        on."""
        first, last = self.timing.get("first_token", 0.0), self.timing.get("last_token", 0.0)
        sampled = self.usage.get("sampled_tokens", 0) - self._first_usage.get("sampled_tokens", 0)
        return {
            "prompt": self._first_usage.get("ff_tokens", 0) / first if first else 0.0,
            "sampling": sampled / (last - first) if last > first else 0.0,
        }

    def save(self, path: Path) -> None:
        """Write the whole report to a file as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._json() + "\n", encoding="utf-8")

    def _json(self) -> str:
        names = ("request", "response", "text", "logs", "raw_storage", "storage", "error", "usage", "timing", "tps")
        return json.dumps({name: getattr(self, name) for name in names}, ensure_ascii=False, indent=1)

    # -- printing --------------------------------------------------------------------------------------------

    def print_json(self) -> None:
        """Print the whole report as JSON."""
        say(self._json())

    def print_end(self) -> None:
        """Print the texts, then counts, times and variables."""
        for text in self.text:
            self._say(3, f"[Response] {text}")
            if self.level < 3:
                say(text)
        if self.level < 3 and any(self.logs) and not any(self.text):
            print("bridle: the run has logs but no text; --log-level 3 shows them", file=sys.stderr)
        self._say(3, f"Usage: {_pairs(self.usage)}")
        self._say(3, f"Timing: {_pairs({name: round(value, 3) for name, value in self.timing.items()})}")
        self._say(3, f"Tokens/sec: {_pairs({name: round(value, 1) for name, value in self.tps.items()})}")
        self._say(3, f"Storage: {json.dumps(self.storage, ensure_ascii=False)}")

    def _print_logs(self, index: int, text: str) -> None:
        """Print complete lines of a fork's log, each with the fork's number. An incomplete line is kept until its end
        arrives."""
        *lines, rest = (self._partial.pop(index, "") + text).split("\n")
        for line in lines:
            self._say(3, f"[{index}]: {line}")
        if rest:
            self._partial[index] = rest

    def _flush_logs(self) -> None:
        for index, rest in sorted(self._partial.items()):
            self._say(3, f"[{index}]: {rest}")
        self._partial.clear()

    def _say(self, level: int, line: str) -> None:
        if self.level >= level:
            say(line)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"
